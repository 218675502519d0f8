// The AMX path (bf16 tiles). With KVB_AMX_EMULATE the same text runs on emulated tiles, for tests without the hardware.
#define LANES 16
#define KVB_INTERLEAVED
#define KVB_STACKED_HEADS 8
#include "path_amx.h"

#ifdef KVB_AMX_EMULATE
KVB_HIDDEN extern const Path kvb_path_amx_emulated;
const Path kvb_path_amx_emulated = {KVB_PATH_AMX_EMULATED, 4.3f, 190.0f, scratch_bytes, run_item, merge_item};
#else
KVB_HIDDEN extern const Path kvb_path_amx;
const Path kvb_path_amx = {KVB_PATH_AMX, 4.3f, 190.0f, scratch_bytes, run_item, merge_item};
#endif
