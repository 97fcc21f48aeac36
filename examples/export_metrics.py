"""Copy the metrics of a run into TensorBoard, MLflow or Weights & Biases.

export TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local
python examples/export_metrics.py RUN tensorboard logs    # pip install tensorboard; tensorboard --logdir logs
python examples/export_metrics.py RUN mlflow sqlite:///mlflow.db                        # pip install mlflow
python examples/export_metrics.py RUN wandb my-project    # pip install wandb; WANDB_MODE=offline keeps it here
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from urllib.parse import quote

import httpx

from tinsmith.settings.environment import client_address

Write = Callable[[int, dict[str, float]], object]


def points_of(run_id: str) -> dict[int, dict[str, float]]:
    """The numbers of each step, the client's and the server's together."""
    url, key = client_address()
    where = f"{url}/api/v1/training_runs/{quote(run_id, safe='')}/metrics"
    answer = httpx.get(where, headers={"X-API-Key": key}).raise_for_status().json()
    found: dict[int, dict[str, float]] = {}
    for point in answer["points"]:
        numbers = {name: value for name, value in point["metrics"].items() if value is not None}
        found.setdefault(point["step"], {}).update(numbers)
    return dict(sorted(found.items()))


@contextlib.contextmanager
def tensorboard(run_id: str, directory: str) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(f"{directory}/{run_id.replace(':', '-')}") as writer:
        yield lambda step, numbers: [writer.add_scalar(name, value, step) for name, value in numbers.items()]


@contextlib.contextmanager
def mlflow(run_id: str, tracking_uri: str) -> Iterator[Write]:
    import mlflow

    mlflow.set_tracking_uri(tracking_uri)
    with mlflow.start_run(run_name=run_id):
        yield lambda step, numbers: mlflow.log_metrics(numbers, step=step)


@contextlib.contextmanager
def wandb(run_id: str, project: str) -> Iterator[Write]:
    import wandb

    with wandb.init(project=project, name=run_id) as run:
        yield lambda step, numbers: run.log(numbers, step=step)


run_id, tool, target = sys.argv[1:]
points = points_of(run_id)
with {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}[tool](run_id, target) as write:
    for step, numbers in points.items():
        write(step, numbers)
print(f"{len(points)} steps of {run_id} are in {target}")
