"""Vercel's AI SDK against a server: text, streams, tools and objects through its three providers."""

import json
import os
import subprocess
from pathlib import Path

from checks import KEY, NPM, TOOLS, URL, check

WAIT_S = 300
SCRIPT = """
import { createRequire } from "node:module";
const load = createRequire(process.env.NPM_ROOT + "/");
const { generateText, streamText, tool, jsonSchema, Output } = load("ai");
const { createOpenAI } = load("@ai-sdk/openai");
const { createAnthropic } = load("@ai-sdk/anthropic");
const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
const key = process.env.SERVER_KEY, url = process.env.SERVER_URL, name = process.env.SERVER_TOOLS;
const openai = createOpenAI({ baseURL: url + "/v1", apiKey: key });
const models = {
  responses: openai.responses(name),
  chat: openai.chat(name),
  messages: createAnthropic({ baseURL: url + "/v1", apiKey: key })(name),
  compatible: createOpenAICompatible({
    name: "tinsmith", baseURL: url + "/v1", apiKey: key, supportsStructuredOutputs: true, includeUsage: true,
  })(name),
};
const schema = jsonSchema({
  type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"], additionalProperties: false,
});
const weather = tool({ description: "of a city", inputSchema: schema });
const asked = { prompt: "Say hello.", maxRetries: 0, maxOutputTokens: 80 };
const tell = async (check, work) => {
  try { await work(); console.log(JSON.stringify({ check, error: null })); }
  catch (error) { console.log(JSON.stringify({ check, error: String(error.responseBody ?? error.stack) })); }
};
const must = (condition, what) => { if (!condition) throw new Error(JSON.stringify(what) ?? "undefined"); };
for (const [kind, model] of Object.entries(models)) {
  await tell(kind + ": text", async () => {
    const found = await generateText({ ...asked, model });
    must(found.usage.outputTokens > 0, found.usage);
  });
  await tell(kind + ": stream", async () => {
    let error; const found = streamText({ ...asked, model, onError: (event) => { error = event.error; } });
    for await (const _ of found.textStream) {}
    if (error) throw error;
    must((await found.usage).outputTokens > 0, await found.usage);
  });
  await tell(kind + ": a required tool", async () => {
    const found = await generateText({ ...asked, model, tools: { weather }, toolChoice: "required" });
    must(["Rome", "Oslo"].includes(found.toolCalls[0].input.city), found.toolCalls);
  });
  await tell(kind + ": an object", async () => {
    const found = await generateText({ ...asked, model, output: Output.object({ schema }) });
    must(["Rome", "Oslo"].includes(found.output.city), found.text);
  });
  await tell(kind + ": an object or a call of a tool", async () => {
    const found = await generateText({ ...asked, model, tools: { weather }, output: Output.object({ schema }) });
    must(found.toolCalls.length || ["Rome", "Oslo"].includes(found.output.city), found.text);
  });
}
"""

environment = {**os.environ, "NPM_ROOT": str(Path(NPM).parent.parent), "SERVER_KEY": KEY, "SERVER_URL": URL}
environment["SERVER_TOOLS"] = TOOLS
command = ["node", "--input-type=module", "--eval", SCRIPT]
completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
with check("the script"):
    assert completed.returncode == 0, completed.stderr[-2000:]
for line in completed.stdout.splitlines():
    if line.startswith("{"):
        report = json.loads(line)
        with check(report["check"]):
            assert report["error"] is None, report["error"]
