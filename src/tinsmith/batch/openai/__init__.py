"""OpenAI's batches: a file of requests becomes a bulk job, and what came of it two files.

`rows` keeps the batches and checks a file before anything of it is done, `reconciler` leads each batch from one
status to the next, `results` makes the files at its end. The work itself is a bulk job's (`batch`), whose operation
`openai_request` answers a line.

Statuses: validating -> in_progress -> finalizing -> completed; validating -> failed where the file is not what it must
be. Whoever cancels: cancelling -> cancelled. When the window is over: expiring (its clients see finalizing) -> expired.
What was done by then is in the output file, and whatever was not is named in the error file. A bulk job that fails
makes its batch failed, in the same way.

Every step can be cut short and is taken again: statuses are rows, the bulk job of a batch is found by its name, and the
files have ids that follow from the batch's. So each request has one line in one of the two files, whatever died.
"""

from __future__ import annotations

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")
MAX_REQUESTS = 50_000
MAX_INPUT_BYTES = 200 * 1000 * 1000
WINDOW = "24h"
