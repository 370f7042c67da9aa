"""Which engine processes there are, and which GPUs each one sees."""

from __future__ import annotations

import logging

import msgspec

from batchinfer.core.records import Record
from batchinfer.engines.config import EngineConfig

logger = logging.getLogger(__name__)


class Placement(Record, frozen=True, kw_only=True):
    """The replicas to start, as (name, environment additions), and the configuration that all get."""

    config: EngineConfig
    replicas: list[tuple[str, dict[str, str]]]
    revision: str = ""


def place(config: EngineConfig) -> Placement:
    """Decide how many replicas there are and where they run.

    Raises:
        ConfigError: more GPUs were asked for than there are, the model cannot be split so, or it takes no such length.
    """
    if config.engine == "echo":
        count = 1 if config.replicas == "auto" else config.replicas
        names = [f"replica {index}" for index in range(count)]
        return Placement(config=config, replicas=[(name, {}) for name in names])
    from batchinfer.engines.gpus import choose_parallelism, is_driver_order, visible_gpus
    from batchinfer.engines.models import check_length, describe_model

    model = describe_model(config)
    check_length(config, model)
    gpus = visible_gpus(config.gpus)
    plan = choose_parallelism(model, gpus, config)
    logger.info("%s", plan.explanation)
    if plan.warning:
        logger.warning("%s", plan.warning)
    config = msgspec.structs.replace(config, tensor_parallel_size=plan.tensor_parallel_size)
    size = plan.tensor_parallel_size * config.pipeline_parallel_size
    replicas: list[tuple[str, dict[str, str]]] = []
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if is_driver_order(config.gpus) else {}
    for index in range(plan.replicas):
        group = [gpu.id for gpu in gpus[index * size : (index + 1) * size]]
        if group:
            listed = ",".join(group)
            environment = {"CUDA_VISIBLE_DEVICES": listed, **order}
            replicas.append((f"replica {index} (GPU {listed})", environment))
        else:
            replicas.append((f"replica {index}", {}))
    idle = len(gpus) - plan.replicas * size
    if idle > 0:
        logger.warning(
            "%d of %d GPUs stay idle: %d replicas of %d GPUs each",
            idle,
            len(gpus),
            plan.replicas,
            size,
        )
    return Placement(config=config, replicas=replicas, revision=model.revision)
