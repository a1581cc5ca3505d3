"""The gate before a checkpoint: it refuses qparams that must not be served, and names them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch

from inlay.errors import StatisticsError
from inlay.observers import QParamsDict
from inlay.recipe import Plan, Slot
from inlay.steps.accepting import known_words

__all__ = ["describe_unusable", "require_servable", "require_servable_part"]


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """A slot that cannot be served, the reason, and the words that accept it."""

    slot: Slot
    saw: str
    accepted_by: frozenset[str]

    def __str__(self) -> str:
        return f"{self.slot.name} ({self.saw})"


def require_servable(
    plan: Plan, qparams: Mapping[str, QParamsDict], *, accept: Collection[str] = ()
) -> frozenset[str]:
    """Refuse qparams that would make a wrong checkpoint.

    :param accept: problems to accept: `unobserved` and `not_finite` leave modules in full
        precision, `unfused` lets layers that are served as one have separate global scales
    :return: the modules that stay in full precision
    """
    full_precision = require_servable_part(plan, qparams, accept=accept)
    if full_precision >= {slot.module for slot in plan.slots.values()}:
        raise StatisticsError("no module has usable scales, so there is nothing to quantize")
    return full_precision


def require_servable_part(
    plan: Plan, qparams: Mapping[str, QParamsDict], *, accept: Collection[str] = ()
) -> frozenset[str]:
    """Refuse the same of a part of a plan, which may have nothing to quantize."""
    accepted = known_words(accept)
    problems = list(_problems(plan, qparams))
    _refuse_attention(problems)
    refused = [problem for problem in problems if not problem.accepted_by & accepted]
    if refused:
        words = sorted({max(problem.accepted_by) for problem in refused})
        raise StatisticsError(
            f"{_count(refused)} would be served with unusable scales: "
            f"{'; '.join(map(str, refused))}. Run batches that reach them, ignore their modules in "
            f"the recipe, or write these in full precision with finalize(accept={_as_set(words)})"
        )
    full_precision = frozenset(problem.slot.module for problem in problems)
    if "unfused" not in accepted:
        _refuse_unfused(plan, qparams, full_precision)
    return full_precision


def describe_unusable(name: str, values: torch.Tensor) -> str | None:
    """Describe the problem of a scale or a zero point; return None if it has none."""
    values = values.detach().float()
    wrong = {"not finite": ~values.isfinite()}
    if name != "zero_point":
        wrong["zero"] = values == 0
        wrong["negative"] = values.isfinite() & (values < 0)
    counts = {what: int(where.sum()) for what, where in wrong.items()}
    found = [f"{count} {what}" for what, count in counts.items() if count]
    return f"of {values.numel()} {name}s, {' and '.join(found)}" if found else None


def _problems(plan: Plan, qparams: Mapping[str, QParamsDict]) -> Iterable[_Problem]:
    for slot in plan.slots.values():
        known: Mapping[str, object] = qparams.get(slot.name, {})
        values = {key: known.get(key) for key in slot.needed_qparams}
        if any(value is None for value in values.values()):
            # A weight is always seen. For other slots the reason is no longer known.
            words = {"not_finite"} if slot.base_name == "weight" else {"unobserved", "not_finite"}
            yield _Problem(
                slot=slot, saw="no usable data, so no qparams", accepted_by=frozenset(words)
            )
            continue
        found = [
            text
            for key, value in values.items()
            if isinstance(value, torch.Tensor) and (text := describe_unusable(key, value))
        ]
        if found:
            yield _Problem(slot=slot, saw="; ".join(found), accepted_by=frozenset({"not_finite"}))


def _refuse_attention(problems: list[_Problem]) -> None:
    """Refuse problems in attention: a config quantizes keys and values in all layers or none."""
    refused = [problem for problem in problems if problem.slot.base_name in ("q", "k", "v")]
    if refused:
        raise StatisticsError(
            f"{_count(refused)} of attention have no usable scales: "
            f"{'; '.join(map(str, refused))}. A checkpoint quantizes the attention of all layers "
            "or of none: run batches that reach them, or leave kv_cache and attention targets out "
            "of the recipe"
        )


def _refuse_unfused(
    plan: Plan, qparams: Mapping[str, QParamsDict], full_precision: frozenset[str]
) -> None:
    refused = []
    for parent, members in plan.fused_groups():
        for base_name in ("weight", "input"):
            kinds = {
                member: _shared_kind(f"{parent}{member}", base_name, plan, qparams, full_precision)
                for member in members
            }
            if len(set(kinds.values())) > 1:
                found = (f"{member}: {kind}" for member, kind in kinds.items())
                refused.append(f"{parent}{{{', '.join(found)}}} ({base_name})")
    if refused:
        raise StatisticsError(
            "layers that are served as one need one global scale, but have: "
            + "; ".join(refused)
            + ". Quantize or ignore all of them alike, or accept it with "
            'finalize(accept={"unfused"})'
        )


def _shared_kind(
    module: str,
    base_name: str,
    plan: Plan,
    qparams: Mapping[str, QParamsDict],
    full_precision: frozenset[str],
) -> str:
    """Describe what layers that are served as one must have in common."""
    slot = plan.slots.get(f"{module}.{base_name}")
    if module in full_precision:
        return "full precision"
    if slot is None or "global_scale" not in slot.needed_qparams:
        return "no global scale"
    value = qparams[slot.name].get("global_scale")
    assert isinstance(value, torch.Tensor)
    return f"global scale {value.item():.9g}"


def _count(problems: list[_Problem]) -> str:
    return f"{len(problems)} slot{'s' if len(problems) > 1 else ''}"


def _as_set(words: list[str]) -> str:
    return "{" + ", ".join(f'"{word}"' for word in words) + "}"
