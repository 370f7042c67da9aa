"""Translates requests to a pooling model into vLLM's terms, and vLLM's outputs into completions. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from batchinfer.core.errors import ConfigError, RowError
from batchinfer.core.records import Completion, Failure, Pooled, Request, RequestInput
from batchinfer.core.tasks import CLASSIFY, EMBED, REWARD, SCORE, TOKEN_EMBED
from batchinfer.engines.config import EngineConfig

_VLLM_TASKS = {
    EMBED: ("embed",),
    TOKEN_EMBED: ("token_embed",),
    CLASSIFY: ("classify",),
    SCORE: ("classify", "embed"),
    REWARD: ("classify", "token_classify"),
}
"""vLLM's names of the tasks that can answer each of ours. The first that the model does is taken."""
_EMBEDDINGS = ("embed", "token_embed")


class Pooler:
    """What a loaded pooling model does, and how it is asked.

    Args:
        engine: vLLM's LLMEngine.
        config: The configuration of the engine.

    Raises:
        ConfigError: the model does not do the run's task, or refuses an option.
    """

    def __init__(self, engine: Any, config: EngineConfig) -> None:
        self._config = config
        self._tasks = tuple(engine.get_supported_tasks())
        model = engine.vllm_config.model_config
        self._hf_config = model.hf_config
        if not any(name in self._tasks for name in _VLLM_TASKS[config.task]):
            shown = ", ".join(name.replace("_", "-") for name in self._tasks) or "none of them"
            raise ConfigError(
                f"--task {config.task}: {config.model} does not do it; vLLM's tasks that it does: {shown}",
                hint="another --task or model; --engine-arg convert=embed makes a language model embed texts",
            )
        task = self._task_of(config.task, 0)
        if config.task == SCORE and task == "classify" and self._num_labels() != 1:
            raise ConfigError(
                f"--task score: {config.model} has {self._num_labels()} classes, expected one",
                hint="use --task classify",
            )
        try:
            self._params(task, config.dimensions, config.normalize).verify(model)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"--dimensions: vLLM refuses it for this model: {reason}", hint="leave it out"
            ) from error

    def _num_labels(self) -> int:
        return int(getattr(self._hf_config, "num_labels", 0))

    def _task_of(self, task: str, num_queries: int) -> str:
        """Return vLLM's name of the task that answers a request.

        Raises:
            RowError: `wrong_task`: the model does not do the task.
        """
        names = _VLLM_TASKS.get(task, ())
        if task == SCORE:
            names = ("embed",) if num_queries else names
        found = next((name for name in names if name in self._tasks), None)
        if found is None:
            raise RowError("wrong_task", f"the model does not do the task {task!r}")
        return found

    def _params(self, task: str, dimensions: int | None, normalize: bool | None) -> Any:
        from vllm import PoolingParams

        is_embedding = task in _EMBEDDINGS
        return PoolingParams(
            task=task,
            dimensions=dimensions if is_embedding else None,
            use_activation=normalize,
        )

    def params_of(self, request: Request) -> Iterator[Any]:
        """Yield vLLM's PoolingParams for each text of a request.

        Raises:
            RowError: `wrong_task`: the model does not do the task; `engine_rejected`: it scores single texts only.
        """
        task = self._task_of(request.task, request.num_queries)
        if request.task == SCORE and not request.num_queries:
            if task == "embed":
                raise RowError(
                    "wrong_task", "the model embeds texts, and scores only pairs of them"
                )
            if self._num_labels() != 1:
                raise RowError("wrong_task", f"the model has {self._num_labels()} classes, not one")
        own, config = request.pooling, self._config
        dimensions, normalize = config.dimensions, config.normalize
        if own is not None:
            dimensions = own.dimensions if own.dimensions is not None else dimensions
            normalize = own.normalize if own.normalize is not None else normalize
        if normalize is None and request.task == REWARD and task == "classify":
            normalize = False  # a reward is the raw number
        for each in request.prompts:
            params = self._params(task, dimensions, normalize)
            if (
                isinstance(each, RequestInput)
                and each.second_start is not None
                and task == "classify"
            ):
                # vLLM does not take token types from the prompt; its own scores give them this way.
                params.extra_kwargs = {"compressed_token_type_ids": each.second_start}
            yield params

    def pooled(self, output: Any, task: str) -> Pooled:
        """Convert the data of one of vLLM's PoolingRequestOutputs."""
        data = output.outputs.data.float().cpu().contiguous()
        if data.ndim == 0:
            data = data.reshape(1)
        label = ""
        if task == CLASSIFY:
            labels: Mapping[Any, Any] = getattr(self._hf_config, "id2label", None) or {}
            best = int(data.argmax())
            label = str(labels.get(best, labels.get(str(best), best)))
        return Pooled(
            data=data.numpy().astype("<f4").tobytes(), width=int(data.shape[-1]), label=label
        )


class Gathering:
    """The outputs of one request so far, which may have several texts.

    Args:
        request: The request.
        pooler: The model's pooler.
    """

    def __init__(self, request: Request, pooler: Pooler) -> None:
        self.request = request
        self._pooler = pooler
        self._found: dict[int, Any] = {}
        self._seconds: list[tuple[float, float]] = []

    def add(self, index: int, output: Any, seconds: tuple[float, float]) -> Completion | None:
        """Take vLLM's output for the text number `index`. Returns the completion after the last text.

        `seconds` are those that the text waited and ran.
        """
        self._found[index] = output
        self._seconds.append(seconds)
        if len(self._found) < len(self.request.prompts):
            return None
        outputs = [self._found[index] for index in sorted(self._found)]
        pooled = [self._pooler.pooled(output, self.request.task) for output in outputs]
        if self.request.task == SCORE and self.request.num_queries:
            pooled = _cosines(outputs, self.request.num_queries)
        failure = None
        if not all(_is_finite(output) for output in outputs):
            failure = Failure(
                code="engine_error", message="the model gave numbers that are not finite"
            )
        return Completion(
            key=self.request.key,
            failure=failure,
            pooled=[] if failure else pooled,
            prompt_tokens=sum(len(output.prompt_token_ids or ()) for output in outputs),
            cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
            queue_seconds=min(waited for waited, _ in self._seconds),
            generation_seconds=max(ran for _, ran in self._seconds),
        )


def _cosines(outputs: list[Any], num_queries: int) -> list[Pooled]:
    """Return the cosine of each query's embedding and its document's. A single query goes with every document."""
    import torch

    vectors = [output.outputs.data.float() for output in outputs]
    queries, documents = vectors[:num_queries], vectors[num_queries:]
    if len(queries) == 1:
        queries *= len(documents)
    return [
        Pooled(
            data=torch.nn.functional.cosine_similarity(query, document, dim=0)
            .reshape(1)
            .numpy()
            .astype("<f4")
            .tobytes(),
            width=1,
        )
        for query, document in zip(queries, documents, strict=True)
    ]


def _is_finite(output: Any) -> bool:
    return bool(output.outputs.data.isfinite().all())
