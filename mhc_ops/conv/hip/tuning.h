// The numbers that decide speed and nothing else, except that the partial sums of dweight and dbias are cut by
// kWaves · kTokens of the backward: results are the same bits for the same numbers, on any device and at any load.
// Each can be set with -D. docs/hip.md says what was measured.
#pragma once

// The first of two numbers is what an H200 measured best, at 8x4096x4096, W = 4, of a copy: bf16 forward 90 % (with SiLU
// 88), backward 87 (79), fp32 93 and 91 (89). With the second ones it has 81 (78), 79 (72), 93 and 83 (82): those are for
// an AMD GPU, where more channels and rows per thread would leave fewer than four waves on a SIMD.
#if defined(__CUDACC__)
#define MHC_CONV_DEFAULT(cuda, other) cuda
#else
#define MHC_CONV_DEFAULT(cuda, other) other
#endif

// Neighbouring channels of one thread. 16 bytes where registers allow it; the backward keeps 2·W + 1 numbers per
// channel besides its rows, and 8 channels of 16 bits would take it past 128 registers.
#ifndef MHC_CONV_FWD_CHANNELS_32
#define MHC_CONV_FWD_CHANNELS_32 4
#endif
#ifndef MHC_CONV_FWD_CHANNELS_16
#define MHC_CONV_FWD_CHANNELS_16 MHC_CONV_DEFAULT(4, 8)
#endif
#ifndef MHC_CONV_BWD_CHANNELS_32
#define MHC_CONV_BWD_CHANNELS_32 4
#endif
#ifndef MHC_CONV_BWD_CHANNELS_16
#define MHC_CONV_BWD_CHANNELS_16 MHC_CONV_DEFAULT(8, 4)
#endif

// Rows of one step, for types of 32 and of 16 bits: as many are on their way to a thread at any time.
#ifndef MHC_CONV_FWD_ROWS_32
#define MHC_CONV_FWD_ROWS_32 4
#endif
#ifndef MHC_CONV_FWD_ROWS_16
#define MHC_CONV_FWD_ROWS_16 MHC_CONV_DEFAULT(7, 4)
#endif
#ifndef MHC_CONV_BWD_ROWS_32
#define MHC_CONV_BWD_ROWS_32 MHC_CONV_DEFAULT(4, 2)
#endif
#ifndef MHC_CONV_BWD_ROWS_16
#define MHC_CONV_BWD_ROWS_16 4
#endif

// Tokens that one wave walks, and waves in a block, each on its own tokens.
#ifndef MHC_CONV_FWD_TOKENS
#define MHC_CONV_FWD_TOKENS 128
#endif
#ifndef MHC_CONV_FWD_WAVES
#define MHC_CONV_FWD_WAVES MHC_CONV_DEFAULT(4, 2)
#endif
#ifndef MHC_CONV_BWD_TOKENS
#define MHC_CONV_BWD_TOKENS MHC_CONV_DEFAULT(256, 128)
#endif
#ifndef MHC_CONV_BWD_WAVES
#define MHC_CONV_BWD_WAVES 2
#endif

// What bounds the registers: blocks that fit on one multiprocessor (CUDA), or waves on one SIMD (HIP); one less with
// seq_idx, which has ids to keep.
#ifndef MHC_CONV_FWD_BLOCKS
#define MHC_CONV_FWD_BLOCKS MHC_CONV_DEFAULT(2, 3)
#endif
#ifndef MHC_CONV_BWD_BLOCKS
#define MHC_CONV_BWD_BLOCKS MHC_CONV_DEFAULT(2, 3)
#endif

constexpr int kLanes = 64;  // threads side by side on channels: one wave of an AMD GPU, two warps of an NVIDIA one
