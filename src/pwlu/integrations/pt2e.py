"""Quantise the inputs of PWLUs to 8 bits in PyTorch's PT2E flow (torchao). Without this, they stay in float32.

config = get_default_x86_inductor_quantization_config()
quantizer = PWLUQuantizer(X86InductorQuantizer().set_global(config))
prepared = prepare_pt2e(torch.export.export(model.eval(), (sample,)).module(), quantizer)
prepared(images)  # calibrate
quantized = convert_pt2e(prepared)
pwlu.tabulate_(quantized)
"""

import warnings
from typing import Any

import torch
from torch import fx

from pwlu import ops
from pwlu.common.text import install

try:
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
except ImportError as error:
    raise ImportError(f"pwlu.integrations.pt2e needs the package torchao ({error}): {install('int8')}") from error


class PWLUQuantizer(Quantizer):
    """A quantizer that wraps another quantizer and also quantizes the input of every PWLU to 8 bits.

    A convolution or linear layer before the PWLU can then return 8-bit values, and the PWLU becomes a table
    (:func:`pwlu.tabulate_`). The wrapped quantizer decides whether the output of a PWLU is quantized.

    Args:
        quantizer: the wrapped quantizer, such as ``X86InductorQuantizer().set_global(config)``.
        inputs: how to quantize the inputs of PWLUs. Default: None, which uses the wrapped quantizer's setting for activations
            (``config.input_activation``). With ``qscheme=torch.per_channel_affine``, every channel has its own scale.

    Raises:
        ValueError: if the wrapped quantizer has no setting for activations, or the quantization is dynamic.
    """

    def __init__(self, quantizer: Quantizer, inputs: QuantizationSpec | None = None) -> None:
        super().__init__()
        self.quantizer = quantizer
        found = inputs or getattr(getattr(quantizer, "global_config", None), "input_activation", None)
        if found is None:
            raise ValueError(
                f"PWLUQuantizer: {type(quantizer).__name__} has no setting for activations. Either give it one, such as "
                "X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config()), or pass "
                "PWLUQuantizer(quantizer, inputs=QuantizationSpec(...))"
            )
        if getattr(found, "is_dynamic", False):
            raise ValueError(
                "PWLUQuantizer: a table needs a fixed scale, but this quantization is dynamic. Use one with is_dynamic=False"
            )
        self.inputs = found

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """Call the other quantizer."""
        return self.quantizer.transform_for_annotation(model)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Annotate what to quantize."""
        with warnings.catch_warnings():  # about inputs of pools, which the second call quantizes if they follow a PWLU
            warnings.filterwarnings("ignore", "The input of maxpool2d is not quantized", UserWarning)
            self.quantizer.annotate(model)
        # Each quantizer requires its own class of annotations.
        made = [node.meta[Q_ANNOTATION_KEY] for node in model.graph.nodes if Q_ANNOTATION_KEY in node.meta]
        kind: type[Any] = type(made[0]) if made else QuantizationAnnotation
        for node in model.graph.nodes:
            if node.target is ops.forward and Q_ANNOTATION_KEY not in node.meta:
                if not made:
                    raise ValueError(
                        f"{type(self.quantizer).__name__} annotated nothing in this model, so its PWLUs have no 8-bit inputs. "
                        "Call set_global(config) on it. If you did, update torch and torchao: X86InductorQuantizer of torchao "
                        f"0.18 finds no layers with torch 2.11, but does with 2.15. This is torch {torch.__version__}."
                    )
                annotation = kind(input_qspec_map={node.args[0]: self.inputs}, _annotated=True)
                if hasattr(annotation, "_is_output_of_quantized_pattern"):
                    annotation._is_output_of_quantized_pattern = True  # lets pools work on 8 bits too
                node.meta[Q_ANNOTATION_KEY] = annotation
        return self.quantizer.annotate(model)  # annotate again, for the operators after PWLUs; the others have annotations

    def validate(self, model: fx.GraphModule) -> None:
        """Call the other quantizer."""
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: fx.GraphModule, observers: Any) -> None:
        """Call the other quantizer."""
        self.quantizer.prepare_obs_or_fq_callback(model, observers)
