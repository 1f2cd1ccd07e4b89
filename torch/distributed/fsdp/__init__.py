"""FSDP1, ``FullyShardedDataParallel``, and FSDP2, ``fully_shard``, and what goes with each."""

import inspect as _inspect

from ._flat_param import FlatParameter as FlatParameter
from ._fully_shard import *  # noqa: F403  (a later release exports more)
from ._fully_shard import __all__ as _OF_FULLY_SHARD
from ._fully_shard import fully_shard
from ._fully_shard._fsdp_policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from ._fully_shard._fsdp_settings import (
    set_backward_prefetch as set_backward_prefetch,
)
from ._fully_shard._fsdp_settings import (
    set_coalesced_collectives as set_coalesced_collectives,
)
from ._fully_shard._fsdp_settings import (
    set_reduce_bucket_cap as set_reduce_bucket_cap,
)
from ._fully_shard._fsdp_summary import layout_summary as layout_summary
from .fully_sharded_data_parallel import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)


# What the release exports of FSDP2, and the branch's own
_OF_FSDP2 = [
    *_OF_FULLY_SHARD,
    "layout_summary",
    "set_backward_prefetch",
    "set_coalesced_collectives",
    "set_reduce_bucket_cap",
]
# pyrefly: ignore [bad-dunder-all]
__all__ = [  # noqa: PLE0604
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    *_OF_FSDP2,
]

for _name in _OF_FSDP2:
    globals()[_name].__module__ = __name__

# So that a unit's default policy equals one that users make
# pyrefly: ignore [missing-attribute]
fully_shard.__wrapped__.__kwdefaults__["mp_policy"] = MixedPrecisionPolicy()
fully_shard.__doc__ = (
    _inspect.cleandoc(fully_shard.__doc__ or "")
    + """

.. note::
   The parameters of a unit may differ in dtype. One all-gather takes all of them,
   each in the dtype that it computes in. Their gradients are reduced by one
   reduce-scatter for each reduce dtype, with the divide factor of that dtype, or,
   with ``grad_comm_dtype``, sent by one all-to-all. Each sharded parameter and its
   sharded gradient keep the dtype that the parameter was stored in. Which dtypes
   these are is up to ``mp_policy``, for a whole unit or for each parameter, see
   :class:`MixedPrecisionPolicy`; :func:`layout_summary` prints what comes of it.
   A module must itself cast what it passes from a parameter of one dtype to one of
   another: FSDP casts the inputs and outputs of whole modules alone.
"""
)
