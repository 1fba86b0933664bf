"""The Piecewise Linear Unit (PWLU), a learnable activation function.

    report = pwlu.convert_(model, sample)                          # replace activations with PWLUs
    phases = pwlu.TwoPhase(model, optimizer, realign_at=steps)     # then train as usual
    pwlu.fuse_(model)                                              # for inference

:class:`pwlu.PWLU` is the module and :mod:`pwlu.functional` the functional form. :mod:`pwlu.reference` defines the mathematics.
"""

from pwlu import functional, reference
from pwlu.analysis.alignment import Alignment, alignment
from pwlu.analysis.shapes import Shapes, describe
from pwlu.baselines import activation
from pwlu.conversion.conversion_report import Report, Site
from pwlu.conversion.convert import convert_
from pwlu.conversion.fuse_norms import fuse_norms_, unfuse_norms_
from pwlu.conversion.kinds import DEFAULT_KINDS
from pwlu.conversion.replacing import restore_
from pwlu.conversion.saving import load_into, save
from pwlu.deploy.fuse import FusedPWLU, fuse_
from pwlu.deploy.int8_tables import tabulate_
from pwlu.deploy.onnx_export import export_onnx
from pwlu.deploy.simplify import refine_, simplify_
from pwlu.kernels import eager
from pwlu.kernels.dispatch import warm_up
from pwlu.learning.constraining import constrain_
from pwlu.learning.curvature import curvature
from pwlu.learning.freezing import freeze_
from pwlu.learning.parameter_groups import parameter_groups
from pwlu.learning.realignment import realign_
from pwlu.learning.regridding import regrid_
from pwlu.learning.two_phase import TwoPhase
from pwlu.plotting.alignment import plot_alignment
from pwlu.plotting.functions import plot_functions
from pwlu.plotting.gain_chart import plot_improvements
from pwlu.units.dynamic import DynamicPWLU
from pwlu.units.module import PWLU
from pwlu.units.nonuniform import NonUniformPWLU
from pwlu.version import __version__

__all__ = [
    "DEFAULT_KINDS",
    "PWLU",
    "Alignment",
    "DynamicPWLU",
    "FusedPWLU",
    "NonUniformPWLU",
    "Report",
    "Shapes",
    "Site",
    "TwoPhase",
    "__version__",
    "activation",
    "alignment",
    "constrain_",
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
    "regrid_",
    "restore_",
    "save",
    "simplify_",
    "tabulate_",
    "unfuse_norms_",
    "warm_up",
]

eager.load()  # must come after the definition of the operators


def __dir__() -> list[str]:
    """Return only the public names, without the submodules that are imported along with them."""
    return __all__
