"""Breaks a barrier, a fence, a bound or an index of a kernel, one at a time, and runs the tests that should notice.

    python tests/mutations [NAME …]     all of them: about an hour on two cores

Prints a table of the mutation, the test that failed and what it said; exits 1 if one went unnoticed. The tests run the
kernels of a copy of csrc/ (UNWEIGHT_CSRC), so the sources stay as they are. First they run without a mutation, since
tests that fail anyway would notice nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from table import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Noticed:
    test: str
    says: str


def copy_mutated(mutation: Mutation, folder: Path) -> Path:
    """A copy of csrc/ with the mutation in it. Raises ValueError if the old text doesn't stand there once."""
    csrc = folder / "csrc"
    shutil.copytree(ROOT / "csrc", csrc)
    path = csrc / "cuda" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(
            f"{mutation.name}: {mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not once"
        )
    path.write_text(text.replace(mutation.old, mutation.new))
    return csrc


def run_tests(csrc: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"UNWEIGHT_CSRC": str(csrc)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def try_mutation(mutation: Mutation) -> Noticed | None:
    with tempfile.TemporaryDirectory() as folder:
        done = run_tests(copy_mutated(mutation, Path(folder)), mutation.tests)
    if done.returncode == 0:
        return None
    test = re.search(r"^_+ (test_.*?) _+$", done.stdout, re.MULTILINE)
    # Only failed tests count: a name that no test has, or a file that doesn't load, proves nothing.
    if done.returncode != 1 or test is None:
        raise RuntimeError(f"{mutation.name}: pytest gave {done.returncode}\n{done.stdout[-3000:]}{done.stderr}")
    said = re.findall(r"^E +(?:[\w.]+: )?(\S.*)$", done.stdout, re.MULTILINE)
    return Noticed(test[1], said[0].split(" < ")[0][:100] if said else "")


def check_unmutated(mutations: list[Mutation]) -> None:
    """Tests that fail anyway notice nothing."""
    files = sorted({test for mutation in mutations for test in mutation.tests if test.endswith(".py")})
    done = run_tests(ROOT / "csrc", tuple(files))
    if done.returncode:
        sys.exit(f"the tests fail without a mutation:\n{done.stdout}{done.stderr}")


def print_table(found: dict[str, Noticed | None]) -> None:
    print("| what is broken | in | the test that notices | what it says |\n|---|---|---|---|")
    for mutation in MUTATIONS:
        if mutation.name in found:
            noticed = found[mutation.name]
            test, says = (f"`{noticed.test}`", noticed.says) if noticed else ("**none**", "")
            print(f"| {mutation.name} | `{mutation.file}` | {test} | {says.replace('|', ' ')} |")


def main() -> int:
    parser = argparse.ArgumentParser(
        "python tests/mutations", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="mutations whose name holds one of these")
    parser.add_argument("--list", action="store_true", help="name the mutations and run nothing")
    parser.add_argument("--json", action="store_true", help="an object from names to tests instead of a Markdown table")
    parser.add_argument("--jobs", type=int, default=2, help="so many at once (default: 2)")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if not arguments.names or any(name in m.name for name in arguments.names)]
    if not chosen:
        parser.error(f"no mutation's name holds one of {arguments.names}")
    if arguments.list:
        print("\n".join(mutation.name for mutation in chosen))
        return 0
    check_unmutated(chosen)
    found: dict[str, Noticed | None] = {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for mutation, noticed in zip(chosen, pool.map(try_mutation, chosen), strict=True):
            found[mutation.name] = noticed
            progress = noticed.test if noticed else "NOT NOTICED"
            print(f"[{len(found)}/{len(chosen)}] {mutation.name}: {progress}", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps({name: noticed and vars(noticed) for name, noticed in found.items()}, indent=1))
    else:
        print_table(found)
    return int(None in found.values())


if __name__ == "__main__":
    sys.exit(main())
