"""What a pooling model can do, read from its config.json before anything is loaded. Pure.

The rules are vLLM's own, which go by the end of the architecture's name. A model that no rule knows is left to vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.core.errors import ConfigError
from batchinfer.core.tasks import CLASSIFY, EMBED, GENERATE, REWARD, SCORE, TOKEN_EMBED, PairForm
from batchinfer.engines.config import EngineConfig

_GENERATORS = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
_CLASSIFIERS = ("ForSequenceClassification", "ClassificationModel")
_TOKEN_CLASSIFIERS = ("ForTokenClassification",)
_ENCODERS = ("BertModel", "RobertaModel")
_DEFAULT_LABELS = 2
"""Number of classes that transformers takes if a config names none."""


def with_overrides(config: EngineConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json, and those that ``--engine-arg hf_overrides`` puts in their place."""
    overrides = config.engine_args.get("hf_overrides")
    return {**values, **overrides} if isinstance(overrides, dict) else dict(values)


def check_task(config: EngineConfig, values: Mapping[str, Any]) -> None:
    """Refuse a task that the model does not do, as far as its config tells.

    Args:
        config: The engine's configuration.
        values: Entries of config.json, with overrides.

    Raises:
        ConfigError: the message says what the model lacks.
    """
    architecture = _architecture(values)
    is_classifier = architecture.endswith(_CLASSIFIERS)
    is_converted = config.engine_args.get("convert", "auto") != "auto"
    if not architecture or is_converted:
        return
    task = config.task
    if task == GENERATE and architecture.endswith((*_ENCODERS, *_CLASSIFIERS, *_TOKEN_CLASSIFIERS)):
        instead = EMBED if architecture.endswith(_ENCODERS) else CLASSIFY
        raise _refused(config, f"{architecture} writes no text", instead)
    if task in (EMBED, TOKEN_EMBED):
        if is_classifier or architecture.endswith(_TOKEN_CLASSIFIERS):
            raise _refused(config, f"{architecture} gives classes and no embedding", CLASSIFY)
        _check_dimensions(config, values)
    if task == CLASSIFY and architecture.endswith((*_GENERATORS, *_ENCODERS)):
        raise _refused(config, f"{architecture} has no classes", EMBED)
    if task == CLASSIFY and architecture.endswith(_TOKEN_CLASSIFIERS):
        raise _refused(config, f"{architecture} classifies tokens and not texts", REWARD)
    if task == REWARD and architecture.endswith((*_GENERATORS, *_ENCODERS)):
        raise _refused(config, f"{architecture} is no reward model", EMBED)
    if task == SCORE and is_classifier and num_labels(values) > 1:
        raise _refused(
            config, f"{architecture} has {num_labels(values)} classes, expected one", CLASSIFY
        )


def pair_form(values: Mapping[str, Any]) -> PairForm:
    """Return how a model reads a pair of texts. `values` are the entries of config.json, with overrides."""
    if not _architecture(values).endswith((*_CLASSIFIERS, "ForRanking")):
        return PairForm.APART
    is_language_model = bool(
        values.get("classifier_from_token") or values.get("is_original_qwen3_reranker")
    )
    separates = values.get("use_pad_token", values.get("use_sep_token", not is_language_model))
    return PairForm.JOINED if separates else PairForm.CHAINED


def keeps_no_cache(values: Mapping[str, Any]) -> bool:
    """Whether the model is an encoder, which reads a text in one step and keeps no KV cache."""
    architecture = _architecture(values)
    is_encoder = any(name in architecture for name in ("Bert", "Roberta", "Deberta", "T5Encoder"))
    return is_encoder or values.get("is_causal") is False


def num_labels(values: Mapping[str, Any]) -> int:
    """Return the number of classes that a config states."""
    tokens = values.get("classifier_from_token")
    if tokens:
        return 1 if values.get("method") == "from_2_way_softmax" else len(tokens)
    names = values.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    stated = values.get("num_labels")
    return stated if isinstance(stated, int) and stated > 0 else _DEFAULT_LABELS


def _architecture(values: Mapping[str, Any]) -> str:
    architectures = values.get("architectures") or [""]
    return str(architectures[0])


def _check_dimensions(config: EngineConfig, values: Mapping[str, Any]) -> None:
    wanted = config.dimensions
    if wanted is None:
        return
    known = values.get("matryoshka_dimensions")
    if not known and not values.get("is_matryoshka"):
        raise ConfigError(
            f"--dimensions {wanted}: the model's config does not say that its embeddings may be cut (Matryoshka)",
            hint="leave it out; for a model that was trained for it all the same: "
            "--engine-arg 'hf_overrides={\"is_matryoshka\":true}'",
        )
    if isinstance(known, list) and known and wanted not in known:
        raise ConfigError(
            f"--dimensions {wanted}: the model's embeddings can be cut to "
            f"{', '.join(map(str, known))} numbers",
        )


def _refused(config: EngineConfig, reason: str, instead: str) -> ConfigError:
    return ConfigError(
        f"--task {config.task}: {config.model} does not do it: {reason}",
        hint=f"try --task {instead}, or another model",
    )
