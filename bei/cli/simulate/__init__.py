"""The scheduling simulator: traces through schedulers on simulated devices, whose steps take what a cost model says.

Discrete events. bei's side is the very code of ``bei.batching``, told the simulated time; the peers' policies are
written from their descriptions. Knows no text, no HTTP, no engine.
"""

from bei.simulation.devices import CostTable, Fleet, read_table
from bei.simulation.front import Front
from bei.simulation.policies import POLICIES, Policy
from bei.simulation.result import Result
from bei.simulation.simulator import simulate
from bei.simulation.trace import Request, Trace

__all__ = ["POLICIES", "CostTable", "Fleet", "Front", "Policy", "Request", "Result", "Trace", "read_table", "simulate"]
