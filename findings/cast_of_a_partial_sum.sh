#!/usr/bin/env bash
# The sum is still partial when it is cast: the reduction runs in the narrow dtype.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
for values, dtype, expected in (
    ([70000.0, -70000.0], torch.float16, (torch.nan, 0.0)),
    ([256.0, 1.0, 1.0, 1.0], torch.bfloat16, (258.0, 260.0)),
):
    total = distribute_tensor(torch.tensor(values), mesh, [Shard(0)]).sum()
    seen = torch.stack([total.to(dtype).full_tensor(), total.full_tensor().to(dtype)])
    print(f"{values} in {dtype}: cast, then whole {seen[0]}; whole, then cast {seen[1]}")
    assert torch.equal(seen.nan_to_num(-1), torch.tensor(expected, dtype=dtype).nan_to_num(-1))
END
