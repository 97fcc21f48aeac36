"""inspect-ai against a server, through its providers openai/ and openai-api/: an evaluation of one sample each."""

import os
import tempfile

URL, KEY, NANO = (os.environ[name] for name in ("SERVER_URL", "SERVER_KEY", "SERVER_NANO"))
os.environ |= {"TINSMITH_API_KEY": KEY, "TINSMITH_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": KEY}

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import get_model  # noqa: E402
from inspect_ai.scorer import includes  # noqa: E402

task = Task(dataset=[Sample(input="Say hello.", target="hello")], scorer=includes(ignore_case=True))
for model in (
    get_model(f"openai-api/tinsmith/{NANO}"),
    get_model(f"openai/{NANO}", base_url=f"{URL}/v1", api_key=KEY, responses_api=False),
    get_model(f"openai/{NANO}", base_url=f"{URL}/v1", api_key=KEY, responses_api=True),
):
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, max_tokens=40, log_dir=logs, display="none")
    assert log.status == "success", log.error
