"""The command line: what scripts rely on (exit codes, JSON, one line of error) and what people see."""

import errno
import json
import os
import pty
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoints import bf16, sharded_model, tree, write_safetensors
from safetensors.torch import save_file

from unweight_ext.cli import main
from unweight_ext.terminal import size_text


@pytest.fixture
def model(tmp_path) -> Path:
    return sharded_model(tmp_path / "model", shards=2)


@pytest.fixture
def packed(model, tmp_path) -> Path:
    assert main(["compress", str(model), str(tmp_path / "packed"), "-q"]) == 0
    return tmp_path / "packed"


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    capsys.readouterr()
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def shell(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "unweight_ext", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_there_and_back(capsys, model, tmp_path):
    packed, back = tmp_path / "packed", tmp_path / "back"
    code, out, err = run(capsys, "compress", model, packed)
    assert (code, err) == (0, "") and "tensors packed" in out and str(packed) in out
    code, out, err = run(capsys, "verify", packed, "--against", model)
    assert (code, err) == (0, "") and "every bit as it was" in out and f"compared with {model}" in out
    code, out, err = run(capsys, "decompress", packed, back)
    assert (code, err) == (0, "") and "every hash right" in out
    assert tree(back) == tree(model)


def test_json_of_every_command(capsys, model, tmp_path):
    packed = tmp_path / "packed"
    code, out, err = run(capsys, "compress", model, packed, "--json", "--layout", "nibble", "--verify", "--threads", 2)
    s = json.loads(out)
    assert (code, err) == (0, "") and s["layout"] == "nibble" and s["verified"] is True and s["packed"] == 4
    assert s["bytes_in"] == sum(len(b) for b in tree(model).values() if b)
    assert s["bytes_out"] == sum(len(b) for b in tree(packed).values() if b)
    assert s["ratio"] == s["safetensors_out"] / s["safetensors_in"] < 1
    assert 12 < s["bits_per_weight"] < 14

    code, out, _ = run(capsys, "verify", packed, "--json")
    v = json.loads(out)
    assert code == 0 and v["ok"] is True and v["problems"] == [] and v["files"] == s["files"]
    assert set(v["digests"]) == {n for n, b in tree(model).items() if b is not None}

    code, out, _ = run(capsys, "inspect", packed, "--json", "--sort", "size")
    tensors = json.loads(out)["tensors"]
    assert code == 0 and len(tensors) == s["tensors"]
    sizes = [t["original_bytes"] for t in tensors]
    assert sizes == sorted(sizes, reverse=True)

    code, out, _ = run(capsys, "decompress", packed, tmp_path / "back", "--json")
    assert code == 0 and json.loads(out)["bytes_out"] == s["bytes_in"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "the following arguments are required: COMMAND"),
        (["shrink"], 2, "invalid choice: 'shrink'"),
        (["compress", "a"], 2, "the following arguments are required: OUT"),
        (["compress", "a", "b", "--layout", "zip"], 2, "invalid choice: 'zip'"),
        (["compress", "a", "b", "--threads", "x"], 2, "invalid int value: 'x'"),
        (["compress", "nothere", "b"], 2, "nothere: doesn't exist"),
        (["compress", "{model}", "{packed}"], 2, "packed: exists already"),
        (["compress", "{model}", "x", "--threads", "-1"], 2, "threads: -1, expected 0"),
        (["compress", "{packed}", "x"], 2, "already packed"),
        (["decompress", "{model}", "x"], 2, "not a packed checkpoint"),
        (["verify", "{model}"], 2, "not a packed checkpoint"),
        (["verify", "nothere"], 2, "nothere: doesn't exist"),
        (["inspect", "nothere"], 2, "nothere: doesn't exist"),
        (["inspect", "{model}", "--sort", "colour"], 2, "invalid choice: 'colour'"),
        (["inspect", "{model}", "--plot", "x.doc"], 2, "x.doc: expected a name that ends in"),
        (["demo", "nothere"], 2, "nothere: doesn't exist"),
        (["decompress", "{damaged}", "x"], 1, "its size and hash are"),
        (["verify", "{damaged}"], 1, "verification failed, 1 problem"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_errors(capsys, monkeypatch, model, packed, tmp_path, arguments, code, message, as_json):
    monkeypatch.chdir(tmp_path)
    damaged = tmp_path / "damaged"
    os.rename(packed, damaged)
    main(["compress", str(model), str(packed), "-q"])
    (damaged / "tokenizer.json").write_bytes(b"{}")
    before = tree(tmp_path)
    values = {"model": model, "packed": packed, "damaged": damaged}
    filled = [a.format(**values) for a in arguments] + ["--json"] * as_json
    if "--plot" in arguments and find_spec("matplotlib") is None:
        message = "--plot needs matplotlib"
    found, out, err = run(capsys, *filled)
    last = err.splitlines()[-1]
    assert found == code and last.startswith("unweight: error: ") and message in last
    assert len(err.splitlines()) == (2 if "verification" in message else 1)
    if as_json:
        answer = json.loads(out)
        assert message in answer["error"] and answer["exit_code"] == code
    else:
        assert out == ""
    assert tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link to nothing", "circle of links"])
def test_what_is_neither_a_file_nor_a_folder(capsys, packed, tmp_path, kind):
    path, expected = tmp_path / "x.safetensors", "neither a file nor a folder"
    with ExitStack() as stack:
        if kind == "pipe":
            os.mkfifo(path)
            # So that who opens it isn't kept waiting.
            stack.callback(os.close, os.open(path, os.O_RDWR))
        elif kind == "socket":
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(path))
        elif kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "link to nothing":
            path.symlink_to("nothere")
            expected = "a link to nothing: nothere"
        else:
            path.symlink_to("y")
            (tmp_path / "y").symlink_to(path)
            expected = os.strerror(errno.ELOOP)
        out = tmp_path / "z.safetensors"
        commands = (["compress", path, out], ["decompress", path, out], ["verify", path], ["inspect", path])
        for command in (*commands, ["demo", path], ["verify", packed, "--against", path]):
            assert run(capsys, *command) == (2, "", f"unweight: error: {path}: {expected}\n")
        if kind in ("pipe", "socket", "device"):
            (tmp_path / "folder").mkdir()
            inside = tmp_path / "folder" / "x.safetensors"
            os.rename(path, inside)
            for command in ("compress", "demo"):
                code, _, err = run(capsys, command, inside.parent, *[tmp_path / "out"] * (command == "compress"))
                assert code == 2 and err.startswith(f"unweight: error: {inside}: {expected}")


@pytest.mark.parametrize("error", [RuntimeError("oops"), ValueError("oops"), AssertionError("oops"), KeyError("oops")])
def test_a_mistake_of_ours_is_no_difference(capsys, monkeypatch, packed, error):
    """Python would exit with 1, which means that stored bytes are damaged."""

    def mistaken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("unweight_ext.checkpoint.verify_checkpoint", mistaken)
    code, out, err = run(capsys, "verify", packed, "--json")
    assert code == 70 and json.loads(out) == {"error": f"{type(error).__name__}: {error}", "exit_code": 70}
    assert err.startswith("Traceback") and "in mistaken" in err
    assert err.splitlines()[-1] == f"unweight: error: {type(error).__name__}: {error}"


def test_names_do_nothing_to_the_terminal(capsys, tmp_path):
    """A name may hold escape sequences, ends of lines, and characters that turn the text around."""
    name = "a\x1b[2J\n\x9b31m\u202eb.weight"
    shown = "a\\x1b[2J\\n\\x9b31m\\u202eb.weight"
    source, packed = tmp_path / "x.safetensors", tmp_path / "p\x1b.safetensors"
    write_safetensors(source, {name: bf16("trained", 64, 512)})
    outputs = [run(capsys, "inspect", source), run(capsys, "compress", source, packed)]
    outputs += [run(capsys, "inspect", packed), run(capsys, "verify", packed)]
    data = bytearray(packed.read_bytes())
    data[-2000] ^= 1
    packed.write_bytes(data)
    outputs += [run(capsys, "verify", packed), run(capsys, "decompress", packed, tmp_path / "y.safetensors")]
    assert [code for code, _, _ in outputs] == [0, 0, 0, 0, 1, 1]
    for _, out, err in outputs:
        assert not {"\x1b", "\x9b", "\u202e"} & {*out, *err}
    assert shown in outputs[0][1] and shown in outputs[2][1] and "p\\x1b.safetensors" in outputs[4][2]
    assert len(outputs[5][2].splitlines()) == 1


def test_no_sync_is_passed_on(capsys, monkeypatch, model, tmp_path):
    calls = []
    monkeypatch.setattr(os, "fsync", calls.append)
    packed, back = tmp_path / "packed", tmp_path / "back"
    assert run(capsys, "compress", model, packed, "--no-sync", "-q")[0] == 0
    assert run(capsys, "decompress", packed, back, "--no-sync", "-q")[0] == 0
    assert not calls
    assert run(capsys, "decompress", packed, back, "-f", "-q")[0] == 0
    assert calls


def test_verify_names_every_problem(capsys, packed):
    (packed / "tokenizer.json").write_bytes(b"{}")
    (packed / "desktop.ini").write_bytes(b"")
    code, out, err = run(capsys, "verify", packed, "--json")
    answer = json.loads(out)
    assert code == 1 and answer["ok"] is False and len(answer["problems"]) == 2
    for problem in answer["problems"]:
        assert f"unweight: {problem}\n" in err


def test_quiet_says_nothing(capsys, model, packed, tmp_path):
    assert run(capsys, "compress", model, packed, "--force", "-q") == (0, "", "")
    assert run(capsys, "verify", packed, "-q") == (0, "", "")
    assert run(capsys, "inspect", packed, "-q") == (0, "", "")
    assert run(capsys, "decompress", packed, tmp_path / "back", "-q") == (0, "", "")


def test_inspect_shows_each_tensor(capsys, model, packed):
    code, out, _ = run(capsys, "inspect", packed)
    lines = out.splitlines()
    row = next(line for line in lines if "embed_tokens" in line).split()
    assert code == 0 and row[:4] == ["model.embed_tokens.weight", "333×64", "BF16", "archive"]
    assert 10 < float(row[5]) < 14 and 2 < float(row[6]) < 3 and 10 < float(row[7]) < 11
    assert "bits per weight, floor" in lines[-1]
    assert sum("model." in line for line in lines) == 13

    code, out, _ = run(capsys, "inspect", model)
    assert code == 0 and "estimate" in out.splitlines()[1] and "an estimate by entropy" in out.splitlines()[-1]

    code, out, _ = run(capsys, "inspect", packed, "--fast", "--sort", "name")
    names = [line.split()[0] for line in out.splitlines() if "model." in line and "layers" in line]
    assert code == 0 and names == sorted(names) and "floor " not in out.splitlines()[-1]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib")
def test_inspect_plots(capsys, model, packed, tmp_path):
    for source in (packed, model):
        assert run(capsys, "inspect", source, "-q", "--plot", tmp_path / "x.png") == (0, "", "")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = run(capsys, "inspect", packed, "--fast", "--plot", tmp_path / "no.png")
    assert code == 2 and out == "" and not (tmp_path / "no.png").exists()
    code, out, _ = run(capsys, "inspect", packed, "--plot", tmp_path / "x.png")
    assert code == 0 and out.splitlines()[-1] == f"plot: {tmp_path / 'x.png'}"


def test_help_tells_exit_codes_and_examples(capsys):
    for arguments in ([], ["compress"], ["decompress"], ["verify"], ["inspect"], ["demo"]):
        with pytest.raises(SystemExit) as done:
            main([*arguments, "--help"])
        out = capsys.readouterr().out
        assert done.value.code == 0
        assert f"  unweight {' '.join(arguments)}".rstrip() in out and "exit codes:" in out
        assert "  70   " in out and "  130  " in out


def test_as_a_module():
    done = shell("--version")
    assert done.returncode == 0 and done.stdout.startswith("unweight ") and done.stderr == ""
    done = shell("verify", "/nothere")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "unweight: error: /nothere: doesn't exist\n")


def test_a_closed_pipe_changes_no_exit_code(model, packed):
    (packed / "tokenizer.json").write_bytes(b"{}")
    for arguments, code, said in (["inspect", model], 0, b""), (["verify", packed, "--json"], 1, b"hash differs"):
        command = [sys.executable, "-m", "unweight_ext", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert process.wait(60) == code and said in err and err.count(b"\n") == 2 * code


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output(model, packed, unbuffered):
    for arguments in (
        ["--help"],
        ["--version"],
        ["verify", packed, "--json"],
        ["inspect", model],
        ["shrink", "--json"],
    ):
        command = [sys.executable, "-m", "unweight_ext", *map(str, arguments)]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, timeout=120)
        *before, last = done.stderr.splitlines()
        assert (done.returncode, last) == (2, "unweight: error: standard output: No space left on device"), arguments
        assert len(before) == ("shrink" in arguments)


def test_a_full_standard_error_changes_no_exit_code(packed):
    (packed / "tokenizer.json").write_bytes(b"{}")
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "unweight_ext", "verify", packed, "-q"], stderr=full, timeout=120)
    assert done.returncode == 1


def test_ascii_is_enough(tmp_path):
    source = tmp_path / "mödel.safetensors"
    write_safetensors(source, {"gewicht.größe": bf16("trained", 64, 256)})
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for i, change in enumerate(({"PYTHONIOENCODING": "ascii"}, locale)):
        for arguments in (["inspect", source], ["compress", source, tmp_path / f"päcked{i}.safetensors"]):
            done = shell(*arguments, env=os.environ | change)
            assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii()
            assert i or "\\xf6" in done.stdout or "\\xe4" in done.stdout
            assert "\\u2500" not in done.stdout  # lines of the table


def terminal_output(arguments: list[str]) -> str:
    """What a command writes to a terminal on standard error."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "unweight_ext", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=child, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    )
    os.close(child)
    seen = b""
    while True:
        try:
            piece = os.read(parent, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    os.close(parent)
    assert process.wait(60) == 0
    return seen.decode(errors="replace")


def test_a_bar_on_terminals_only(tmp_path):
    source = tmp_path / "x.safetensors"
    tensor = bf16("trained", 512, 2048)
    write_safetensors(source, {f"t{i}.weight": tensor for i in range(16)})
    seen = terminal_output(["compress", str(source), str(tmp_path / "a.safetensors")])
    assert "packing" in seen and "B/s" in seen  # the name is not drawn where the bar is redrawn too seldom to show it
    assert terminal_output(["compress", str(source), str(tmp_path / "b.safetensors"), "-q"]) == ""
    done = shell("compress", source, tmp_path / "c.safetensors")
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("resume", [False, True])
def test_a_full_disk(capsys, monkeypatch, model, tmp_path, resume):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("unweight_ext.checkpoint.pack_file.write_all", full)
    out = tmp_path / "out"
    code, _, err = run(capsys, "compress", model, out, *["--resume"] * resume)
    kept = "finished files are kept for --resume" if resume else "nothing was left behind"
    assert (code, err) == (2, f"unweight: error: {out}: no space left on its disk; {kept}\n")
    assert not out.exists() and (tmp_path / ".out.unfinished").exists() == resume


def test_sizes_are_readable():
    assert [size_text(n) for n in (12, 1234, 5_600_000, 7.89e11)] == ["12 B", "1.23 kB", "5.60 MB", "789.00 GB"]


def test_compress_says_why_other_dtypes_save_nothing(tmp_path, capsys):
    save_file({"a.weight": torch.ones(64, 64, dtype=torch.float16)}, tmp_path / "model.safetensors")
    assert main(["compress", str(tmp_path), str(tmp_path.parent / f"{tmp_path.name}-packed")]) == 0
    out = capsys.readouterr().out
    assert "0 of 1 tensors packed\n" in out
    assert "kept as they are: 8.19 kB of F16; only BF16 is packed" in out
