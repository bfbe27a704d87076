"""`compress_model`: packs the Linear and Embedding modules of a model in place, and reports what it did."""

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from io import StringIO
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from .loading import accept_packed
from .nn import Embedding, Linear, unsupported_embedding
from .ops import cuda_problem, fused_problem
from .packed import info, layout_id, pack_quietly, pad_row_bytes

Skip = str | Iterable[str] | Callable[[str, nn.Module], bool]
Progress = bool | Callable[[int, int, str], None] | None


@dataclass(frozen=True)
class ModuleReport:
    """What became of one module. `layout` is None if it was left alone, and `reason` says why."""

    name: str
    kind: str
    shape: tuple[int, ...]
    layout: str | None
    bytes_before: int  # of the weight; 0 for those tied to an earlier row
    bytes_after: int
    bits_per_weight: float
    reason: str


@dataclass(frozen=True)
class CompressReport:
    """One row per Linear and Embedding; `model_bytes_*` count all parameters and buffers, shared ones once."""

    rows: tuple[ModuleReport, ...]
    model_bytes_before: int
    model_bytes_after: int

    @property
    def packed(self) -> tuple[ModuleReport, ...]:
        """The rows of the modules that are packed."""
        return tuple(row for row in self.rows if row.layout is not None)

    @property
    def left_alone(self) -> tuple[ModuleReport, ...]:
        """The rows of the modules that are not, each with its reason."""
        return tuple(row for row in self.rows if row.layout is None)

    def to_json(self) -> str:
        """The whole report as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(show_footer=True)
        before = sum(row.bytes_before for row in self.rows)
        after = sum(row.bytes_after for row in self.rows)
        table.add_column("module", "Linear and Embedding", overflow="fold")
        table.add_column("shape", justify="right")
        table.add_column("layout")
        table.add_column("MB before", f"{before / 1e6:.2f}", justify="right")
        table.add_column("MB after", f"{after / 1e6:.2f}", justify="right")
        table.add_column("bits", justify="right")
        table.add_column("remark", overflow="fold")
        for row in self.rows:
            table.add_row(
                row.name,
                " x ".join(map(str, row.shape)),
                row.layout or "-",
                f"{row.bytes_before / 1e6:.2f}",
                f"{row.bytes_after / 1e6:.2f}",
                f"{row.bits_per_weight:.2f}",
                row.reason,
            )
        text = StringIO()
        Console(file=text, width=140, markup=False, highlight=False).print(table)
        percent = 100 * self.model_bytes_after / max(self.model_bytes_before, 1)
        return (
            f"{text.getvalue()}{len(self.packed)} packed, {len(self.left_alone)} left alone; whole model "
            f"{self.model_bytes_before / 1e6:.2f} MB -> {self.model_bytes_after / 1e6:.2f} MB ({percent:.1f} %)"
        )


def compress_model(
    model: nn.Module,
    layout: str = "auto",
    *,
    skip: Skip = (),
    exact: bool = False,
    progress: Progress = None,
) -> CompressReport:
    """Packs every torch.nn.Linear and torch.nn.Embedding with a BF16 weight, in place; each weight is freed as it goes.

    `layout`: see `pack`; `auto` is the device's default, and `nibble` for embeddings and what is tied to them.
    `skip`: module names (with all below them), patterns like `"*.router"`, or a function of name and module. A name
    or pattern that fits no module of the model is most likely mistyped: it gives a warning.
    `exact`: see `Linear`. `progress`: a bar on stderr if that is a terminal (None), never (False), always (True), or
    a function of bytes done, bytes in all and the module's name.

    Weights on a GPU are packed on the CPU and moved back. Linear modules need `exact` there, but on a Hopper GPU.
    Names, hooks, biases and tied weights are kept. Left alone, with the reason in the report: other dtypes, subclasses,
    parametrized modules, weights shared with something else, and those that would not get smaller. From then on
    `model.load_state_dict` takes packed and plain weights for all of them, as well as for parameters of other modules.
    Raises ValueError for a model that is itself a Linear or Embedding, and for a wrong `layout`; TypeError for wrong
    types.
    """
    layout_id(layout)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__}, expected a torch.nn.Module")
    if type(model) in (nn.Linear, nn.Embedding):
        raise ValueError(
            f"model: is itself a {type(model).__name__}, which can't be replaced in place; "
            f"use {type(model).__name__}.from_{type(model).__name__.lower()}"
        )
    bytes_before = _model_bytes(model)
    groups, reasons = _plan(model, _skip_function(skip, model), exact)
    parents: dict[str, list[tuple[nn.Module, str]]] = _parents(model, {name for group in groups for name in group})
    total = sum(model.get_submodule(group[0]).weight.nbytes for group in groups)
    rows: dict[str, ModuleReport] = {}
    buffers: dict[str, tuple[Tensor, list[str]]] = {}  # of a group's first name
    done = 0
    with _progress_function(progress) as tell:
        for group in groups:
            first = model.get_submodule(group[0])
            size = first.weight.nbytes
            packed = pack_quietly(first.weight, _group_layout(layout, [model.get_submodule(name) for name in group]))
            del first
            if packed.numel() >= size:
                reasons.update({name: f"doesn't pay: {packed.numel()} bytes packed, {size} plain" for name in group})
            else:
                for name in group:
                    _replace(parents[name], packed, layout, exact)
                buffers[group[0]] = packed, group
            done += size
            tell(done, total, group[0])
    _equalize([packed for packed, _ in buffers.values()])
    for packed, group in buffers.values():
        for name in group:
            rows[name] = _packed_row(name, model.get_submodule(name), packed, "" if name == group[0] else group[0])
    counted: set[int] = set()
    for name, reason in reasons.items():
        rows[name] = _left_row(name, model.get_submodule(name), reason, counted)
    accept_packed(model)
    order = [name for name, _ in model.named_modules() if name in rows]
    return CompressReport(tuple(rows[name] for name in order), bytes_before, _model_bytes(model))


def _plan(
    model: nn.Module, skipped: Callable[[str, nn.Module], bool], exact: bool
) -> tuple[list[list[str]], dict[str, str]]:
    """Names of the modules to pack, those with one weight together, and for the others the reason to leave them.

    Only names: the plan must not keep weights alive.
    """
    users: dict[object, list[str]] = defaultdict(list)  # of each weight
    groups: dict[object, list[str]] = defaultdict(list)
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                users[_identity(parameter)].append(f"{name}.{key}")
        if isinstance(module, (nn.Linear, nn.Embedding)):
            reason = "skipped" if skipped(name, module) else _reason_to_leave(module, exact)
            if reason:
                reasons[name] = reason
            else:
                groups[_identity(module.weight)].append(name)
        elif isinstance(module, (Linear, Embedding)):
            reasons[name] = "already packed"
    plan = []
    for weight, names in groups.items():
        strangers = sorted(set(users[weight]) - {f"{name}.weight" for name in names})
        if strangers:
            reasons.update({name: f"shared with {', '.join(strangers)}, which stays as it is" for name in names})
        else:
            plan.append(names)
    return plan, reasons


def _identity(weight: Tensor) -> object:
    """Equal for one weight in several modules, be it one parameter or several on the same memory."""
    if weight.device.type == "meta" or weight.numel() == 0:
        return id(weight)
    return weight.device, weight.data_ptr(), weight.shape, weight.stride()


def _device_reason(device: torch.device, kind: type[nn.Module], exact: bool) -> str | None:
    """Why modules of this kind, nn.Linear or nn.Embedding, can't run packed on a device."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"on {device}: there are kernels for CPUs and CUDA devices"
    problem = fused_problem(device) if kind is nn.Linear and not exact else cuda_problem(device)
    return f"on {device}: {problem}" if problem else None


def _reason_to_leave(module: nn.Linear | nn.Embedding, exact: bool) -> str | None:
    """Why a module can't be packed, as far as it shows without packing."""
    base = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
    if parametrize.is_parametrized(module):
        return "parametrized"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "torch.nn.MultiheadAttention reads its weight on every call"
    if type(module) is not base:
        return f"a subclass, {type(module).__name__}, may do something else"
    if "forward" in vars(module):
        return "its forward was replaced"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight isn't a plain parameter"
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor:
        return f"its weight is a {type(weight.data).__name__}"
    others = {*module._parameters, *module._buffers, *module._modules} - {"weight", "bias"}
    if others:
        return f"it holds more than weight and bias: {', '.join(sorted(others))}"
    if weight.dtype != torch.bfloat16:
        return f"{str(weight.dtype).removeprefix('torch.')}, only bfloat16 is packed"
    reason = _device_reason(weight.device, base, exact)
    if reason:
        return reason
    if weight.numel() == 0:
        return "no elements"
    return unsupported_embedding(module) if isinstance(module, nn.Embedding) else None


def _skip_function(skip: Skip, model: nn.Module) -> Callable[[str, nn.Module], bool]:
    if callable(skip):
        return skip
    patterns = tuple(skip) if isinstance(skip, Iterable) and not isinstance(skip, str) else (skip,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"skip: {skip!r}, expected names or patterns, or a function of name and module")

    def fits(pattern: str, name: str) -> bool:
        return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")

    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fits(pattern, name) for name in names):
            warnings.warn(f"skip: {pattern!r} fits no module of the model", stacklevel=3)
    return lambda name, module: any(fits(pattern, name) for pattern in patterns)


def _parents(model: nn.Module, names: set[str]) -> dict[str, list[tuple[nn.Module, str]]]:
    """All places of the named modules in their parents: one module may stand in several."""
    name_of = {id(module): name for name, module in model.named_modules() if name in names}
    places: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)
    for parent in model.modules():
        for key, child in parent._modules.items():
            if id(child) in name_of:
                places[name_of[id(child)]].append((parent, key))
    return places


def _group_layout(layout: str, modules: list[nn.Module]) -> str:
    return "nibble" if layout == "auto" and any(isinstance(m, nn.Embedding) for m in modules) else layout


def _replace(places: list[tuple[nn.Module, str]], packed: Tensor, layout: str, exact: bool) -> None:
    """Puts a packed module, with `packed` itself as its buffer, where the original stands."""
    parent, key = places[0]
    old = parent._modules[key]
    if isinstance(old, nn.Linear):
        new: Linear | Embedding = Linear(old.in_features, old.out_features, bias=False, layout=layout, exact=exact)
        new.register_parameter("bias", old.bias)
    else:
        new = Embedding(
            old.num_embeddings, old.embedding_dim, old.padding_idx, layout="nibble" if layout == "auto" else layout
        )
    new.set_packed(packed)
    # Hooks, training mode, and whatever else was attached to the module. The dictionaries stay the same objects, so
    # that handles of hooks still work.
    for name, value in vars(old).items():
        if "_hook" in name or name == "training" or name not in vars(new):
            vars(new)[name] = value
    for parent, key in places:
        parent._modules[key] = new


def _equalize(tensors: list[Tensor]) -> None:
    """Pads weights of equal shape and layout to one row_bytes, so that equal blocks of a model compile once."""
    alike: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for packed in tensors:
        about = info(packed)
        alike[about.layout, about.shape, packed.device].append(packed)
    for group in alike.values():
        row_bytes = max(packed.shape[1] for packed in group)
        for packed in group:
            if packed.shape[1] != row_bytes:
                packed.data = pad_row_bytes(packed, row_bytes)  # in place: it may be tied


def _model_bytes(model: nn.Module) -> int:
    tensors = (t for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
    return sum({_identity(t): t.nbytes for t in tensors}.values())


def _packed_row(name: str, module: Linear | Embedding, packed: Tensor, tied_to: str) -> ModuleReport:
    about = info(packed)
    return ModuleReport(
        name=name,
        kind=type(module).__name__,
        shape=about.shape,
        layout=about.layout,
        bytes_before=0 if tied_to else 2 * about.out_features * about.in_features,
        bytes_after=0 if tied_to else about.nbytes,
        bits_per_weight=about.bits_per_weight,
        reason=f"tied to {tied_to}" if tied_to else "",
    )


def _left_row(name: str, module: nn.Module, reason: str, counted: set[int]) -> ModuleReport:
    if isinstance(module, (nn.Linear, Linear)):
        shape = (module.out_features, module.in_features)
    else:
        shape = (module.num_embeddings, module.embedding_dim)
    # Parametrized modules keep the weight under other names; reading `.weight` would compute it.
    tensors = [t for key, t in (*module.named_parameters(), *module.named_buffers()) if key != "bias"]
    size = sum(t.nbytes for t in tensors)
    fresh = sum(t.nbytes for t in tensors if id(t) not in counted)
    counted.update(map(id, tensors))
    return ModuleReport(name, type(module).__name__, shape, None, fresh, fresh, 8 * size / max(prod(shape), 1), reason)


@contextmanager
def _progress_function(progress: Progress) -> Iterator[Callable[[int, int, str], None]]:
    if callable(progress):
        yield progress
        return
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda done, total, name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)
