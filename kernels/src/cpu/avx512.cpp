// The avx512 path: the fp32 text with 16 lanes.
#define LANES 16
#define TILE_ROWS 12
#define TILE_VECTORS 2
#include "path_f32.h"

KVB_HIDDEN extern const Path kvb_path_avx512;
const Path kvb_path_avx512 = {KVB_PATH_AVX512, 0.5f, 300.0f, scratch_bytes, run_item, merge_item};
