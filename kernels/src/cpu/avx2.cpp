// The avx2 path: the fp32 text with 8 lanes.
#define LANES 8
#define TILE_ROWS 6
#define TILE_VECTORS 2
#include "path_f32.h"

KVB_HIDDEN extern const Path kvb_path_avx2;
const Path kvb_path_avx2 = {KVB_PATH_AVX2, 0.3f, 300.0f, scratch_bytes, run_item, merge_item};
