"""pwlu: the Piecewise Linear Unit, an activation function that a network learns for itself.

    report = pwlu.convert_(model, sample)                          # activations -> PWLUs
    phases = pwlu.TwoPhase(model, optimizer, realign_at=steps)     # then train as usual
    pwlu.fuse_(model)                                              # for inference

The mathematics is in :mod:`pwlu.reference`, the function in :mod:`pwlu.functional`, the module is :class:`pwlu.PWLU`.
"""

from pwlu import functional, reference
from pwlu.analysis import Alignment, alignment
from pwlu.baselines import activation
from pwlu.conversion.kinds import DEFAULT_KINDS
from pwlu.convert import convert_, restore_
from pwlu.export import export_onnx
from pwlu.fuse import FusedPWLU, fuse_
from pwlu.fuse_norms import fuse_norms_, unfuse_norms_
from pwlu.implementations import warm_up
from pwlu.improvements import plot_improvements
from pwlu.learning import TwoPhase, freeze_, parameter_groups
from pwlu.module import PWLU
from pwlu.plot import plot_alignment, plot_functions
from pwlu.realignment import realign_
from pwlu.saving import load_into, save
from pwlu.shapes import Shapes, describe
from pwlu.simplify import refine_, simplify_
from pwlu.smoothing import curvature
from pwlu.tables import tabulate_
from pwlu.version import __version__

__all__ = [
    "DEFAULT_KINDS",
    "PWLU",
    "Alignment",
    "FusedPWLU",
    "Shapes",
    "TwoPhase",
    "__version__",
    "activation",
    "alignment",
    "convert_",
    "curvature",
    "describe",
    "export_onnx",
    "freeze_",
    "functional",
    "fuse_",
    "fuse_norms_",
    "load_into",
    "parameter_groups",
    "plot_alignment",
    "plot_functions",
    "plot_improvements",
    "realign_",
    "reference",
    "refine_",
    "restore_",
    "save",
    "simplify_",
    "tabulate_",
    "unfuse_norms_",
    "warm_up",
]
