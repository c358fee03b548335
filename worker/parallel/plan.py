"""Whether a model can be split by its heads, as its configuration tells."""

from typing import Any

from prefixd.worker.model.errors import ModelRefused

_KV_PROJECTIONS = frozenset({"k_proj", "kv_b_proj"})
"""What layers call that which makes their keys; kv_b_proj in latent attention."""
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")


def check_split(config: Any, *, rank_count: int, model_name: str) -> None:
    """Looks at transformers' tensor parallel plan and the numbers of heads.

    Args:
        config: of the whole model.
        rank_count: how many ranks each hold as many heads.
        model_name: for the error.

    Raises:
        ModelRefused: the model has no plan, the plan leaves KV heads whole, or heads are left over.
    """
    reason = _reason(config.get_text_config(), rank_count)
    if reason is not None:
        raise ModelRefused(model_name=model_name, reason=reason)


def _reason(text_config: Any, rank_count: int) -> str | None:
    plan = getattr(text_config, "base_model_tp_plan", None)
    if not plan:
        return "transformers has no tensor parallel plan for it"
    styles = {name.rsplit(".", 1)[-1]: style for name, style in plan.items()}
    if not any(styles.get(name) == "colwise" for name in _KV_PROJECTIONS):
        return "transformers' tensor parallel plan for it does not split its KV heads"
    for name in _HEAD_COUNTS:
        count = getattr(text_config, name, None)
        if count is not None and count % rank_count:
            return f"its {count} heads ({name}) cannot be split evenly over {rank_count} ranks"
    return None
