"""Let transformers' own ``from_pretrained`` load converted models.

A model must be converted after its creation and before its weights are loaded. transformers documents only one hook for this: a
registered quantizer, which ``quantization_config`` in ``config.json`` names. The quantizer of this module quantizes nothing. It
inserts the PWLUs. If this module is not imported, transformers warns that the type ``pwlu`` is unknown.
"""

from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pwlu.conversion.saving import conversion_of, convert_as_

METHOD = "pwlu"


@register_quantization_config(METHOD)
class PWLUConfig(QuantizationConfigMixin):
    """The record of a conversion in ``config.json``.

    Args:
        conversion: the result of ``conversion_of(model)``.
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
        """Remove the marks of quantization, so that the model trains and saves as usual. Its config keeps the conversion."""
        for name in ("hf_quantizer", "quantization_method"):
            if hasattr(model, name):
                delattr(model, name)
        model.is_quantized = False
        model.config.quantization_config = self.quantization_config
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Return whether the model can be saved: always."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Return whether the model can be trained: always."""
        return True


def record_conversion(model: Any) -> None:
    """Write the conversion of a model into its config, if it has one: the Trainer also accepts models without."""
    if not hasattr(model, "config"):
        return
    method = _method(model.config)
    if method not in (None, METHOD):
        raise ValueError(
            f"save_pretrained: the model is quantized by {method}, but config.json can describe either the quantization or the "
            "PWLUs, not both. Save the model before it is quantized"
        )
    model.config.quantization_config = PWLUConfig(conversion_of(model))


def has_conversion(config: Any) -> bool:
    """Return whether a config has the record of a conversion."""
    return _method(config) == METHOD


def _method(config: Any) -> Any:
    found = getattr(config, "quantization_config", None)
    return found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
