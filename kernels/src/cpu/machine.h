// The paths of this library and the choice among them.
#pragma once
#include "item.h"

// The path with this id, or the best for KVB_PATH_AUTO; null where it is not compiled in or this machine cannot run it.
KVB_HIDDEN const Path* kvb_choose(int32_t path);
