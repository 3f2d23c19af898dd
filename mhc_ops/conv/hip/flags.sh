# What build.py and run_channellast_test.sh give to the compilers.
CPU_FLAGS="-x c++ -std=c++17 -O1 -Wno-unknown-pragmas"
CUDA_FLAGS="-x cu -std=c++17 -O3"
# The SLP vectorizer pairs channels across rows and takes up to 100 registers more.
HIP_FLAGS="-x hip -std=c++17 -O3 -fno-slp-vectorize"
