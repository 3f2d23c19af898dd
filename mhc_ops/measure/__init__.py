"""How exact and how fast: what `mhc-ops check`, `mhc-ops bench` and the tests share."""
