"""A simulator of decoding over many GPUs: read times, step times, and frontiers of throughput.

It follows the evaluation of Helix (Bhatia et al. 2025, section 3 and appendix A): what a step
reads, computes and sends under each layout, by rates of the hardware and named constants.
"""

from jspec.helix.simulator.calibration import Fit, Point, calibrated, load_fits
from jspec.helix.simulator.configurations import Configurations, configurations
from jspec.helix.simulator.constants import Constants
from jspec.helix.simulator.cost import StepTimes, pipelined, step_times
from jspec.helix.simulator.frontier import Frontier, Simulation, simulate, swept
from jspec.helix.simulator.measured import Prediction, predicted_us, predictions
from jspec.helix.simulator.roofline import kv_read_us, weight_read_us
from jspec.helix.simulator.shapes import Hardware, ModelShape, load_hardware, load_shape

__all__ = [
    "Configurations",
    "Constants",
    "Fit",
    "Frontier",
    "Hardware",
    "ModelShape",
    "Point",
    "Prediction",
    "Simulation",
    "StepTimes",
    "calibrated",
    "configurations",
    "kv_read_us",
    "load_fits",
    "load_hardware",
    "load_shape",
    "pipelined",
    "predicted_us",
    "predictions",
    "simulate",
    "step_times",
    "swept",
    "weight_read_us",
]
