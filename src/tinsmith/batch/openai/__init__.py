"""OpenAI's batches: a file of requests becomes a bulk job, and its results two files.

`rows` stores the batches and checks an input file, `reconciler` moves each batch from one status to the next, `results`
writes the files at its end. The requests are run by a bulk job, whose operation `OpenAIRequest` answers a line.

Statuses: validating -> in_progress -> finalizing -> completed; validating -> failed for an invalid file. After a
cancel: cancelling -> cancelled. After the window: expiring (shown to clients as finalizing) -> expired. Finished
requests are in the output file, and the others are named in the error file. A bulk job that fails makes its batch
failed, in the same way.

Every step can be interrupted and repeated: statuses are rows, the bulk job of a batch is found by its name, and the ids
of files are derived from the batch's. So each request has exactly one line in one of the two files.
"""

from __future__ import annotations

MESSAGES = "/v1/messages"
"""The endpoint of Anthropic's message batches, which are kept as OpenAI's and shown on routes of their own."""
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MAX_REQUESTS = 50_000
MAX_INPUT_BYTES = 200 * 1000 * 1000
WINDOW = "24h"
