"""The conformance kit: holds any MLA decode to the numbers that every kvbridge backend is held to.

grid.py        factors, and cases in which every pair of factor values meets
scenario.py    a case made into tensors: poisoned pages, slots, lengths, q, and buffers for the answer
bounds.py      answer against the float64 reference
properties.py  what one answer cannot show: equal bits over runs, batches and dead bytes; NaN that stays where it is
targets.py     what is tested: a backend of this package, or any callable that fills a scenario's buffers
report.py      the table

python -m kvbridge.kernels.conformance --backend cpu
python -m kvbridge.kernels.conformance --target package.module:TARGET
"""

from kvbridge.kernels.conformance.bounds import Judgement, judge
from kvbridge.kernels.conformance.grid import Case, cases, flashmla_cases
from kvbridge.kernels.conformance.report import Report, run
from kvbridge.kernels.conformance.scenario import Scenario, build
from kvbridge.kernels.conformance.targets import Target, Traits, backend_target

__all__ = [
    "Case",
    "Judgement",
    "Report",
    "Scenario",
    "Target",
    "Traits",
    "backend_target",
    "build",
    "cases",
    "flashmla_cases",
    "judge",
    "run",
]
