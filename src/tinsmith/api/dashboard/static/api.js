// The client of the API. The entered key is stored for this tab only, never in a cookie. Open tabs of this origin give it
// to a new one and forget it together.

const NAME = "tinsmith.key";
const ANSWER_MS = 200; // how long a new tab waits for the key of another
export const ANY = "tml-local"; // a server without keys accepts any key

let memory = null;

export const key = {
  get: () => {
    try {
      return sessionStorage.getItem(NAME) || memory;
    } catch {
      return memory;
    }
  },
  set: (value) => {
    memory = value;
    try {
      if (value === null) sessionStorage.removeItem(NAME);
      else sessionStorage.setItem(NAME, value);
    } catch {
      // Without storage the key stays in memory.
    }
  },
};

const tabs = "BroadcastChannel" in window ? new BroadcastChannel(NAME) : null;
tabs?.addEventListener("message", ({ data }) => {
  if (data === "ask" && key.get()) tabs.postMessage({ key: key.get() });
  if (data === "forget" && key.get()) {
    key.set(null);
    dispatchEvent(new CustomEvent("signedout"));
  }
});

// Takes over the key of another open tab, if this tab has none.
export function shareKey() {
  if (key.get() || !tabs) return Promise.resolve();
  return new Promise((resolve) => {
    const end = () => {
      tabs.removeEventListener("message", hear);
      resolve();
    };
    const hear = ({ data }) => {
      if (!data.key) return;
      key.set(data.key);
      end();
    };
    tabs.addEventListener("message", hear);
    tabs.postMessage("ask");
    setTimeout(end, ANSWER_MS);
  });
}

// Signs this tab and all others out.
export function forgetKey() {
  key.set(null);
  tabs?.postMessage("forget");
}

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

// Fills ids into a path, each as one segment: path`/sessions/${id}`.
export function path(parts, ...ids) {
  return parts.reduce((whole, part, index) => whole + encodeURIComponent(ids[index - 1]) + part);
}

async function send(method, where, body, signal) {
  const headers = { "X-API-Key": key.get() || ANY };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const url = where.startsWith("/oai/") ? where : `/api/v1${where}`;
  try {
    return await fetch(url, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "omit",
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not respond.");
  }
}

// Reads an answer's JSON. Raises ApiError for a refusal, and asks for a key if it was about the key.
async function read(answer, signal) {
  const content = await answer.json().catch(() => ({}));
  if (answer.ok) return content;
  if (answer.status === 401 && !signal?.aborted) dispatchEvent(new CustomEvent("keyneeded", { detail: content.detail }));
  throw new ApiError(answer.status, content.detail || content.error?.message || `The server returned status ${answer.status}.`);
}

export async function ask(method, where, body, signal) {
  return read(await send(method, where, body, signal), signal);
}

// Sends a request whose answer is a stream of events, and yields the content of each. Raises ApiError if the stream has
// an error or ends early.
export async function* stream(where, body, signal) {
  const answer = await send("POST", where, body, signal);
  if (!answer.ok) await read(answer, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let isDone = false;
  try {
    while (!isDone) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The answer ended early.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const text = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n").trim();
        isDone ||= text === "[DONE]";
        if (!text || isDone) continue;
        const content = JSON.parse(text);
        if (content.error) throw new ApiError(answer.status, content.error.message);
        yield content;
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? new ApiError(0, "The connection to the server broke.") : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

export const get = (where, signal) => ask("GET", where, undefined, signal);

// Reads a file as a blob.
export async function getFile(where, signal) {
  const answer = await send("GET", where, undefined, signal);
  return answer.ok ? answer.blob() : read(answer, signal);
}

// Calls a function now and periodically, while the page is visible and until `signal` is aborted.
export function poll(signal, everyS, work) {
  let timer;
  let busy = false;
  const turn = async () => {
    clearTimeout(timer);
    if (signal.aborted || busy) return;
    busy = true;
    try {
      if (!document.hidden) {
        await work();
        document.body.classList.remove("offline");
      }
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      document.body.classList.toggle("offline", error.status === 0);
      if (error.status !== 0 && error.status !== 401) throw error;
    } finally {
      busy = false;
    }
    if (!signal.aborted) timer = setTimeout(turn, everyS * 1000);
  };
  const seen = () => document.hidden || turn();
  document.addEventListener("visibilitychange", seen);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  });
  return turn();
}
