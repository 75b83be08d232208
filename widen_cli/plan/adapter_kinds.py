"""Adapters that are more, or something else, than B A beside a weight, told by their config and by their tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from widen_cli.errors import Faults, WidenError, printable

OTHER_KINDS = {
    "lora_magnitude_vector": "DoRA, whose magnitudes belong to the norms of narrow weights; merge the adapter into its base first",
    "trainable_tokens_delta": "rows of an embedding that replace the base's; merge the adapter into its base first",
    "lora_": "a kind of LoRA that is not known here; merge the adapter into its base first",
}
# Values of adapter_config.json under which an adapter is more than B A beside a weight.
_UNFIT = {
    "use_dora": "DoRA, whose magnitudes belong to the norms of narrow weights",
    "use_qalora": "QA-LoRA, whose A reads groups of inputs",
    "use_bdlora": "BD-LoRA, whose A and B are block-diagonal",
    "kasa_config": "KaSA, which takes a part out of the base's weights when it loads",
    "monteclora_config": "MonteCLoRA, which has weights beside A and B",
    "arrow_config": "Arrow, whose choice of adapters depends on the inputs' norms",
    "target_parameters": "LoRA on parameters such as packed experts, not on modules",
    "layer_replication": "layers that stand for others of the base",
    "trainable_token_indices": "rows of an embedding that replace the base's",
}
# Ways to begin in which PEFT changes the base's weights by what it finds in them, each time the adapter is loaded.
_TAKES_FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


def check_config(config: Mapping[str, Any], file: str) -> None:
    """Raises WidenError for adapters that are more, or something else, than B A beside a weight."""
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise WidenError(
            f"{file}: peft_type is {printable(str(kind))}, and only LORA adapters can be widened; merge it into its base"
        )
    start = config.get("init_lora_weights")
    with Faults() as faults:
        for key in (key for key in _UNFIT if config.get(key)):
            faults.add(
                f"{file}: {key} says that this is {_UNFIT[key]}; merge the adapter into its base, and widen that"
            )
        if isinstance(start, str) and start.lower().startswith(_TAKES_FROM_BASE):
            faults.add(
                f"{file}: init_lora_weights is '{printable(start)}', so PEFT changes the base by its own weights when it loads; save it as "
                "plain LoRA first (save_pretrained with path_initial_model_for_weight_conversion)"
            )
