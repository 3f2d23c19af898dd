"""What the tests share with `mhc-ops check`: cases as data, the comparison with fp64, random cases and misuse."""
