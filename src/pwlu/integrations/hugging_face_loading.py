"""Let transformers' own ``from_pretrained`` load converted models.

transformers has one documented hook that changes a model between its creation and the loading of its weights: a registered
quantizer, named by ``quantization_config`` in ``config.json``. Nothing is quantised here: the quantizer puts the PWLUs in.
Without this module, transformers warns that the type ``pwlu`` is unknown.
"""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pwlu.conversion.saving import conversion_of, convert_as_

METHOD = "pwlu"


@register_quantization_config(METHOD)
class PWLUConfig(QuantizationConfigMixin):
    """How a model was converted, in ``config.json``.

    Args:
        conversion: what ``conversion_of(model)`` returned.
    """

    def __init__(self, conversion: dict[str, Any], **_: Any) -> None:
        self.quant_method = METHOD
        self.conversion = conversion


@register_quantizer(METHOD)
class PWLUQuantizer(HfQuantizer):
    """Converts a model before its weights are loaded."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        convert_as_(model, self.quantization_config.conversion)
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        return model

    def postprocess_model(self, model: Any, **_: Any) -> Any:
        """Let the model be an ordinary one again, which trains and saves as usual. Its config keeps the conversion."""
        for name in ("hf_quantizer", "quantization_method"):
            if hasattr(model, name):
                delattr(model, name)
        model.is_quantized = False
        model.config.quantization_config = self.quantization_config
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return that the model can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return whether the model can be trained."""
        return True


def record(model: Any) -> None:
    """Write the conversion of a model into its config."""
    method = _method(model.config)
    if method not in (None, METHOD):
        raise ValueError(
            f"save_pretrained: the model is quantised by {method}, but config.json can describe either the quantisation or the "
            "PWLUs, not both. Save the model before it is quantised"
        )
    model.config.quantization_config = PWLUConfig(conversion_of(model))


def recorded(config: Any) -> bool:
    """Return whether a config says how its model was converted."""
    return _method(config) == METHOD


def _method(config: Any) -> Any:
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
