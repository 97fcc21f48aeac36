"""Where rows go: one file for each family of formats. `registry.py` imports them when they are asked for."""
