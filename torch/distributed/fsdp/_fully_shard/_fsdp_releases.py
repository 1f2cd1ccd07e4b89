"""The differences between the releases that these files fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from inspect import getmembers, isfunction, signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ._fsdp_param import FSDPParam


# What the branch uses of the release's `FSDPParam`, methods with their parameters; and what
# the release sets on param groups, or imports from replaced files: these must have it.
_NEEDED = """_extensions_data all_gather_inputs _get_grad_inner_tensor(grad) to_sharded()
init_all_gather_outputs(all_gather_input_numels,all_gather_input_dtypes,world_size,device)
init_dtype_attrs(mp_policy) init_unsharded_param() reset_sharded_param() to_unsharded()"""
_GIVEN = r"_group\.(\w+) =|from \._fsdp_(?:coll|param_g)\w+ import ([^(\n]+|\([^)]+)"
_methods = getmembers(FSDPParam, isfunction)
_known = {f"{n}({','.join([*signature(m).parameters][1:])})" for n, m in _methods}
_lacks = {*_NEEDED.split()} - _known - {*dir(FSDPParam), *FSDPParam.__annotations__}
_files = "_fully_shard.py _fsdp_collectives.py _fsdp_param_group.py _fsdp_settings.py"
_paths = map(Path(__file__).with_name, _files.split())
# Without sources, as where only compiled files are kept, names of `FSDPParam` must do
_text, *_ours = (path.read_text() if path.exists() else "" for path in _paths)
_given = " ".join(map(" ".join, re.findall(_GIVEN, _text)))
_adds = {*re.findall(r"\w+", _given)} - {*re.findall(r"\w+", "".join(_ours))}
if _lacks or _adds:  # whatever the version: patch releases may have the same files
    raise ImportError(
        f"torch {torch.__version__}: FSDP2 lacks {sorted(_lacks)} or adds {sorted(_adds)}. "
        "Install 2.13.0, 2.14.1 or 2.15.0, or run `python3 tools/overlay.py --undo`"
    )

IS_2_14: bool = hasattr(dist, "_spmd_no_typecheck")  # or newer
IS_2_15: bool = hasattr(torch.Tensor, "_has_grad_dtype_override")  # or newer


class RELEASE:
    """What a release does itself, and what its operators and arguments are called."""

    # Unsharded gradients, in `grad_dtype`; before 2.15 FSDP does, apart from parameters
    accumulates_by_autograd = IS_2_15
    keeps_grad_dtypes = IS_2_15  # on parameters that are sharded, loaded or cast
    names_frozen_dtypes = IS_2_14  # as those of groups that train nothing
    may_keep_storage = IS_2_15  # whether unsharded memory may outlive reshard
    # Copies gradients in. In 2.15 it is in C++, and on CUDA casts between bf16 and fp32
    chunk_cat = "chunk_cat_mixed_dtype" if IS_2_15 else "chunk_cat"
    # The argument of other releases' `foreach_reduce`
    lacking_argument = "orig_dtype" if IS_2_15 else "prepare_reduce_scatter_inputs"

    @staticmethod
    def default_reduce_dtype(param: torch.Tensor) -> torch.dtype | None:
        """Returns the dtype to reduce a gradient in by default, None: its own."""
        return param.grad_dtype if IS_2_15 else None

    @staticmethod
    def define_operators(lib: torch.library.Library) -> None:
        """Defines the operator that 2.15 has in Python."""
        if IS_2_15:
            ints = "int stream_id, int device_index, int device_type"
            name = lib.define(f"record_grad_output_stream(Tensor buffer, {ints}) -> ()")
            lib.impl(name, lambda *_: None, "CompositeExplicitAutograd")


# Before, NCCL may multiply by garbage in a bf16 PREMUL_SUM (pytorch 190745)
SCALES_BF16: bool = IS_2_15
_HAS_SPMD_TYPES: bool = IS_2_14 and dist._is_spmd_types_available()  # since 2.14


def not_type_checked(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Turns off the checks of ``spmd_types`` while a hook runs."""
    # pyrefly: ignore [missing-attribute]
    return dist._spmd_no_typecheck()(hook) if _HAS_SPMD_TYPES else hook


def restore_spmd_types(fsdp_params: Sequence[Any]) -> None:
    """Annotates the unsharded parameters as users annotated the originals."""
    for fsdp_param in fsdp_params if _HAS_SPMD_TYPES else ():
        fsdp_param._restore_spmd_types(fsdp_param.unsharded_param)


def register_autograd_function(function: type) -> None:
    """Registers an autograd function of local tensors with ``spmd_types``."""
    if _HAS_SPMD_TYPES:
        import spmd_types  # pyrefly: ignore [missing-import]

        spmd_types.register_local_autograd_function(function)
