// The AVX-512 path with bf16 products (needs byte permutes too: AVX512_VBMI).
#define LANES 16
#define KVB_INTERLEAVED
#include "path_bf16.h"

KVB_HIDDEN extern const Path kvb_path_avx512_bf16;
const Path kvb_path_avx512_bf16 = {KVB_PATH_AVX512_BF16, 0.6f, 300.0f, scratch_bytes, run_item, merge_item};
