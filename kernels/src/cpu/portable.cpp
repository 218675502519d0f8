// The portable path: the fp32 text with 4 lanes.
#define LANES 4
#define TILE_ROWS 4
#define TILE_VECTORS 2
#include "path_f32.h"

KVB_HIDDEN extern const Path kvb_path_portable;
const Path kvb_path_portable = {KVB_PATH_PORTABLE, 0.1f, 300.0f, scratch_bytes, run_item, merge_item};
