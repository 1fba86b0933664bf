"""8-bit inputs for PWLUs in PyTorch's PT2E quantisation (torchao), which by itself leaves them in float32.

config = get_default_x86_inductor_quantization_config()
quantizer = PWLUQuantizer(X86InductorQuantizer().set_global(config))
prepared = prepare_pt2e(torch.export.export(model.eval(), (sample,)).module(), quantizer)
prepared(images)  # calibrate
quantised = convert_pt2e(prepared)
pwlu.tabulate_(quantised)
"""

import warnings
from typing import Any

from torch import fx

from pwlu import ops
from pwlu.text import install

try:
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer
    from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY
except ImportError as error:
    raise ImportError(
        f"pwlu.integrations.pt2e needs the package torchao, which could not be imported ({error}): {install('int8')}"
    ) from error


class PWLUQuantizer(Quantizer):
    """Another quantizer, which sees the network as before, and an 8-bit input for every PWLU.

    A convolution or linear layer before the PWLU can then give 8 bits, and the PWLU becomes a table (:func:`pwlu.tabulate_`).
    Its output is quantised where what uses it wants that, by the other quantizer's rules.

    Args:
        quantizer: for everything but PWLUs, such as ``X86InductorQuantizer().set_global(config)``.
        inputs: how to quantise the inputs of PWLUs; by default as the other quantizer does with activations
            (``config.input_activation``). With ``qscheme=torch.per_channel_affine`` every channel has its own scale.
    """

    def __init__(self, quantizer: Quantizer, inputs: QuantizationSpec | None = None) -> None:
        super().__init__()
        self.quantizer = quantizer
        found = inputs or getattr(getattr(quantizer, "global_config", None), "input_activation", None)
        if found is None:
            raise ValueError(
                f"PWLUQuantizer: {type(quantizer).__name__} does not say how it quantises activations. Either tell it, such as "
                "X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config()), or give "
                "PWLUQuantizer(quantizer, inputs=QuantizationSpec(...))"
            )
        if getattr(found, "is_dynamic", False):
            raise ValueError(
                "PWLUQuantizer: a table needs a scale that is known beforehand, and this quantisation is dynamic. "
                "Use one with is_dynamic=False"
            )
        self.inputs = found

    def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
        """As the other quantizer does it."""
        return self.quantizer.transform_for_annotation(model)

    def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
        """Mark what is to be quantised."""
        with warnings.catch_warnings():  # that inputs of pools are not quantised: those behind a PWLU will be
            warnings.filterwarnings("ignore", "The input of maxpool2d is not quantized", UserWarning)
            self.quantizer.annotate(model)
        # Each quantizer has a class of its own for annotations, and insists on it
        made = [node.meta[Q_ANNOTATION_KEY] for node in model.graph.nodes if Q_ANNOTATION_KEY in node.meta]
        kind: type[Any] = type(made[0]) if made else QuantizationAnnotation
        for node in model.graph.nodes:
            if node.target is ops.forward and Q_ANNOTATION_KEY not in node.meta:
                annotation = kind(input_qspec_map={node.args[0]: self.inputs}, _annotated=True)
                if hasattr(annotation, "_is_output_of_quantized_pattern"):
                    annotation._is_output_of_quantized_pattern = True  # then pools may work on 8 bits too
                node.meta[Q_ANNOTATION_KEY] = annotation
        return self.quantizer.annotate(model)  # once more: what is behind a PWLU. The rest has been marked

    def validate(self, model: fx.GraphModule) -> None:
        """As the other quantizer does it."""
        self.quantizer.validate(model)

    def prepare_obs_or_fq_callback(self, model: fx.GraphModule, observers: Any) -> None:
        """As the other quantizer does it."""
        self.quantizer.prepare_obs_or_fq_callback(model, observers)
