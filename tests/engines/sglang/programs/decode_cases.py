"""Runs in SGLang's interpreter: every mode of SGLang's attention backend, its decode beside kvbridge's, and controls.

decode_cases.py OUT.json      OUT.json: what `inspect parity` writes for SGLang
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvbridge.engines.sglang.parity import parity

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(parity(options={})))
