"""inspect-ai against a server, through its providers openai/ and openai-api/: an evaluation of one sample each."""

import os
import tempfile

from checks import KEY, NANO, URL, check

os.environ |= {"TINSMITH_API_KEY": KEY, "TINSMITH_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": KEY}

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes

task = Task(dataset=[Sample(input="Say hello.", target="hello")], scorer=includes(ignore_case=True))
OPENAI = {"base_url": f"{URL}/v1", "api_key": KEY}
for name, model in (
    ("openai-api", get_model(f"openai-api/tinsmith/{NANO}")),
    ("openai by chat", get_model(f"openai/{NANO}", responses_api=False, **OPENAI)),
    ("openai by responses", get_model(f"openai/{NANO}", responses_api=True, **OPENAI)),
):
    with check(name), tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, max_tokens=40, log_dir=logs, display="none")
        assert log.status == "success", log.error
