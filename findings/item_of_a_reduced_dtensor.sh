#!/usr/bin/env bash
# bool(), float() and item() read the rank's own part of what is not yet reduced: one rank sees
# the NaN and skips the step, the other goes on. 2.15.0 reduces all() and any(), not the rest.
. "$(dirname "$0")/common.sh"
ranks 2 <<'END'
bad = distribute_tensor(torch.tensor([1.0, torch.nan]), mesh, [Shard(0)])
good = distribute_tensor(torch.tensor([1.0, 4.0]), mesh, [Shard(0)])
checks = {name: getattr(good, name)() for name in ("sum", "mean", "max", "norm")}
checks |= {"isnan().any": bad.isnan().any(), "isfinite().all": bad.isfinite().all()}
for name, value in checks.items():
    seen = [None] * 2
    dist.all_gather_object(seen, value.item())
    whole = value.full_tensor().item()
    print(f"{torch.__version__} {name}(): item() {seen}, full_tensor() {whole}")
    assert seen[0] != seen[1]
END
