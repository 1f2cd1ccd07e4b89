"""The scenarios of plugins, which a file for each part of torch adds to."""

from __future__ import annotations

from fsdp_common.scenarios import Scenarios

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


SCENARIOS = Scenarios()
scenario = SCENARIOS.on_both
# Of units with several dtypes, which the release refuses
mixed = SCENARIOS.on_branch
of_both_kinds = SCENARIOS.of_both_kinds


def gather_by_hand(group: FSDPParamGroup, *, by_keyword: bool = False) -> None:
    """Unshards with the functions alone, as a test or a backend of one's own does."""
    stream = torch.cpu.current_stream()
    process_group = group.mesh_info.shard_process_group
    arguments = {
        "fsdp_params": [*group.fsdp_params],
        "group": process_group,
        "async_op": by_keyword,
        "all_gather_copy_in_stream": stream,
        "all_gather_stream": stream,
        "device": group.device,
        "all_gather_comm": _fsdp_collectives.DefaultAllGather(),
    }
    gather = _fsdp_collectives.foreach_all_gather
    copy_out = _fsdp_collectives.foreach_all_gather_copy_out
    params = [*group.fsdp_params]
    if by_keyword:
        result = gather(**arguments)
        copy_out(all_gather_result=result, fsdp_params=params, group=process_group)
    else:
        result = gather(*arguments.values())
        copy_out(result, params, process_group)
    for fsdp_param in group.fsdp_params:
        fsdp_param.init_unsharded_param()
