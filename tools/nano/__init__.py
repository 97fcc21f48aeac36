"""How the embedded model `tinsmith/nano` is made; not a part of the package."""
