"""Pools: where the workers of bulk jobs run. `local` starts them as processes of this machine."""
