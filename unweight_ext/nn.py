"""Modules that hold their weight packed: `Linear` and `Embedding` stand where torch.nn's stood."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from . import ops
from .packed import info, layout_id, pack_quietly, pad_row_bytes, transcode_quietly, verify

# Below it, wide loads of a tensor that came from a file would straddle cache lines; torch's own tensors keep to it.
_ALIGNMENT = 64


def _aligned(packed: Tensor) -> Tensor:
    if packed.data_ptr() % _ALIGNMENT or not packed.is_contiguous():
        return packed.clone(memory_format=torch.contiguous_format)
    return packed


class _PackedModule(nn.Module):
    """What the two share: the buffer `weight_packed` [rows, row_bytes], its layout, loading, and `.weight`.

    `layout`: the layout in the buffer now, None while there is no weight. `wanted_layout`: what `archive` payloads and
    BF16 weights become when they are loaded.
    """

    weight_packed: Tensor
    layout: str | None
    wanted_layout: str

    def __init__(self, rows: int, columns: int, layout: str, device: torch.device | str | None) -> None:
        super().__init__()
        if rows < 1 or columns < 1:
            raise ValueError(f"{type(self).__name__}: {rows} x {columns} weights, expected at least 1 x 1")
        layout_id(layout)  # refuses unknown names
        self._shape = (rows, columns)
        self.wanted_layout = layout
        self.layout = None
        self._layout_id = -1
        self.register_buffer("weight_packed", torch.empty((rows, 0), dtype=torch.uint8, device=device))

    @property
    def weight(self) -> Tensor:
        """The weight, bfloat16 [rows, columns], decoded anew on each access. Read-only: see `set_weight`."""
        self._check_loaded()
        return ops.unpack(self.weight_packed, self._shape[1], torch.bfloat16)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__}.weight is read-only, it is decoded from weight_packed; "
                "use set_weight(tensor) to pack another one"
            )
        super().__setattr__(name, value)

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight takes in memory, padding included."""
        return 8 * self.weight_packed.shape[1] / self._shape[1]

    def set_weight(self, weight: Tensor) -> None:
        """Packs a bfloat16 weight [rows, columns] in the wanted layout. Raises ValueError.

        Warns if that takes more memory than the weight itself: tiles pad what is thinner than 64 rows or 128 columns.
        """
        self.set_packed(self._packed_from(weight))

    def set_packed(self, packed: Tensor) -> None:
        """Takes a packed weight as it is, after checking its checksums. Raises ValueError."""
        self.layout = self._checked(packed)
        self._layout_id = ops.LAYOUTS.index(self.layout)
        self.weight_packed = _aligned(packed)

    def _check_loaded(self) -> None:
        if self.layout is None:
            raise RuntimeError(
                f"{type(self).__name__} holds no weight yet: use load_state_dict, set_weight or from_"
                f"{type(self).__name__.lower()}"
            )

    def _packed_from(self, weight: Tensor) -> Tensor:
        if tuple(weight.shape) != self._shape:
            raise ValueError(f"weight: shape {list(weight.shape)}, expected {list(self._shape)}")
        return self._told_if_larger(pack_quietly(weight, self.wanted_layout))

    def _told_if_larger(self, packed: Tensor) -> Tensor:
        plain = 2 * self._shape[0] * self._shape[1]
        if packed.numel() > plain and self.wanted_layout != "raw":
            name = type(self).__name__
            warnings.warn(
                f"{name}: {self._shape[0]} x {self._shape[1]} weights take {packed.numel()} bytes packed, {plain} in a "
                f"torch.nn.{name}; compress_model leaves such a module as it is",
                stacklevel=2,
            )
        return packed

    def _checked(self, packed: Tensor) -> str:
        """The layout of a packed weight that fits this module and is undamaged."""
        about = info(packed)
        if packed.dim() != 2 or (about.out_features, about.in_features) != self._shape:
            raise ValueError(
                f"weight_packed: holds {about.matrices} x {about.out_features} x {about.in_features} weights, expected "
                f"1 x {self._shape[0]} x {self._shape[1]}"
            )
        verify(packed)
        return about.layout

    def _take(self, packed: Tensor, assign: bool) -> None:
        """Puts a loaded weight into the buffer: in place unless `assign`, so that tied weights stay tied."""
        layout = self._checked(packed)
        if layout == "archive" and self.wanted_layout != "archive":
            wanted = ops.LAYOUTS[layout_id(self.wanted_layout, self.weight_packed.device)]
            packed = self._told_if_larger(transcode_quietly(packed, wanted))
            layout = info(packed).layout
        packed = _aligned(packed)
        old = self.weight_packed
        if assign or old.device.type == "meta":
            self.weight_packed = packed
        elif old.shape == packed.shape:
            old.copy_(packed)
        else:
            # A state_dict's tensor must not become the buffer itself: load_state_dict copies.
            on_cpu = old.device.type == "cpu"
            old.data = pad_row_bytes(packed, packed.shape[1]) if on_cpu else packed.to(old.device, copy=True)
        self.layout = layout
        self._layout_id = ops.LAYOUTS.index(layout)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key, plain = f"{prefix}weight_packed", f"{prefix}weight"
        state_dict = dict(state_dict)
        found = key if key in state_dict else plain if plain in state_dict else None
        if found:
            value = state_dict.pop(found)
            try:
                packed = value if found == key else self._packed_from(value)
                self._take(packed, local_metadata.get("assign_to_params_buffers", False))
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{found}: {str(error).removeprefix(f'{found.removeprefix(prefix)}: ')}")
            state_dict[key] = self.weight_packed  # for the checks of torch, which find their own buffer
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "_PackedModule":
        # torch moves buffers one by one, which would make two of a tied one; parameters it moves in place, so do that.
        packed = self.weight_packed
        super()._apply(fn, recurse)
        moved = self.weight_packed
        if moved is not packed and torch._has_compatible_shallow_copy_type(packed, moved):
            packed.data = moved
            self.weight_packed = packed
        return self


class Linear(_PackedModule):
    """torch.nn.Linear with a packed weight; `x` is bfloat16 or float32, and so is the result.

    A new one holds no weight: use `from_linear`, `set_weight`, or load a state_dict with `weight_packed` or a bfloat16
    `weight`. `exact` multiplies with the unpacked weight through F.linear: slower, and bit-identical to it.
    Gradients reach x and the bias, never the weight. `dtype` is that of the bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        layout: str = "auto",
        exact: bool = False,
    ) -> None:
        super().__init__(out_features, in_features, layout, device)
        self.in_features = in_features
        self.out_features = out_features
        self.exact = exact
        self._next: tuple[Linear, ...] = ()  # in a tuple, or it would be a submodule
        zeros = torch.zeros(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))

    @classmethod
    def from_linear(cls, linear: nn.Linear, layout: str = "auto", exact: bool = False) -> "Linear":
        """Packs the bfloat16 weight of a torch.nn.Linear; the bias is shared with it. See `set_weight`."""
        new = cls(linear.in_features, linear.out_features, bias=False, layout=layout, exact=exact)
        new.set_weight(linear.weight)
        new.bias = linear.bias
        return new.train(linear.training)

    def set_next(self, following: "Linear | None") -> None:
        """Tells which Linear runs after this one, so that a GPU fetches its weight early. See `unweight_ext.chain`.

        Copies and pickles of this module don't know it. Raises TypeError.
        """
        if following is not None and not isinstance(following, Linear):
            raise TypeError(f"following: {type(following).__name__}, expected an unweight_ext.Linear or None")
        self._next = () if following is None else (following,)

    def __getstate__(self) -> dict[str, Any]:
        # Not what comes next: a copy of one module would be one of all that are linked with it.
        return {**super().__getstate__(), "_next": ()}

    def forward(self, x: Tensor) -> Tensor:
        # x (..., in_features) -> (..., out_features)
        if self.layout is None:
            self._check_loaded()
        bias = self.bias
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        next_w = self._next[0].weight_packed if self._next else None
        if next_w is not None and next_w.device != x.device:
            next_w = None
        return ops.linear(x, self.weight_packed, bias, next_w, layout=self._layout_id, exact=self.exact)

    def extra_repr(self) -> str:
        text = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        text += f", layout={self.layout}, bits_per_weight={self.bits_per_weight:.2f}"
        return text + (", exact=True" if self.exact else "")


class Embedding(_PackedModule):
    """torch.nn.Embedding with a packed weight: looks rows up without unpacking the table.

    A new one holds no weight: use `from_embedding`, `set_weight`, or load a state_dict. `padding_idx` matters to
    training alone and is only kept. No gradients reach the weight. An id outside the table, or damaged bytes, raise
    RuntimeError on a CPU; on a GPU, which isn't waited for, they give a row of NaN.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        *,
        layout: str = "nibble",
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, layout, device)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, layout: str = "nibble") -> "Embedding":
        """Packs the bfloat16 table of a torch.nn.Embedding. See `set_weight`; ValueError for what it can't do."""
        reason = unsupported_embedding(embedding)
        if reason:
            raise ValueError(f"embedding: {reason}")
        new = cls(embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx, layout=layout)
        new.set_weight(embedding.weight)
        return new.train(embedding.training)

    def forward(self, ids: Tensor) -> Tensor:
        # ids (...) -> (..., embedding_dim) bfloat16
        if self.layout is None:
            self._check_loaded()
        return ops.embedding(ids, self.weight_packed, self.embedding_dim)

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        return f"{text}, layout={self.layout}, bits_per_weight={self.bits_per_weight:.2f}"


def unsupported_embedding(embedding: nn.Embedding) -> str | None:
    """Which option of a torch.nn.Embedding keeps it from being packed, or None."""
    if embedding.max_norm is not None:
        return f"max_norm={embedding.max_norm} changes the weight at each look-up, expected None"
    if embedding.scale_grad_by_freq:
        return "scale_grad_by_freq=True concerns the weight's gradient, which a packed one has not; expected False"
    if embedding.sparse:
        return "sparse=True concerns the weight's gradient, which a packed one has not; expected False"
    return None
