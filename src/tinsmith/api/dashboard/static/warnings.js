// Warnings above every page: runs that need a person, and a machine that is nearly full. On request the browser notifies
// of new ones, also while another tab is open. A dismissed warning stays away in this tab while it lasts.

import { get, path } from "./api.js";
import { button, h, keep } from "./dom.js";
import { shortId } from "./format.js";

const EVERY_S = 15;
const DISMISSED = "tinsmith.dismissed";
const NOTIFY = "tinsmith.notify";

const read = (storage, name) => {
  try {
    return storage.getItem(name);
  } catch {
    return null;
  }
};
const write = (storage, name, value) => {
  try {
    storage.setItem(name, value);
  } catch {
    // Without storage the choice lasts until the page is reloaded.
  }
};

const titleOf = ({ name, run, kind }) => `${run ? `${name || shortId(run)}: ` : ""}${kind}`;

// Updates the warnings until `signal` is aborted. The server is asked while the page is hidden, too, if it may notify.
export function watch(place, signal) {
  const dismissed = new Set((read(sessionStorage, DISMISSED) || "").split("\n").filter(Boolean));
  let announced = null; // the keys of the last answer
  const store = () => write(sessionStorage, DISMISSED, [...dismissed].join("\n"));
  const drawDue = keep(place);
  const draw = (all) => {
    const due = all.filter(({ key }) => !dismissed.has(key));
    place.hidden = !due.length;
    drawDue(due, () => h("ul", {}, due.map((one) => h(
      "li",
      {},
      h("span", {}, one.run ? h("a", { href: `#${path`/runs/${one.run}`}` }, one.name || shortId(one.run)) : null, one.run ? ": " : null, h("strong", {}, one.kind), `: ${one.text}.`),
      button("Dismiss", () => {
        dismissed.add(one.key);
        store();
        draw(all);
      }, { class: "plain", "aria-label": `Dismiss ${titleOf(one)}` }),
    ))));
  };
  const announce = (all) => {
    const news = announced ? all.filter(({ key }) => !announced.has(key)) : [];
    announced = new Set(all.map(({ key }) => key));
    if (mayNotify()) for (const one of news) new Notification(titleOf(one), { body: one.text, tag: one.key, icon: "/dashboard/icon.svg" });
  };
  const turn = async () => {
    if (signal.aborted) return;
    if (!document.hidden || mayNotify()) {
      try {
        const all = (await get("/dashboard/warnings", signal))?.warnings || [];
        // A warning that has ended may come back.
        for (const key of [...dismissed]) if (!all.some((one) => one.key === key)) dismissed.delete(key);
        store();
        announce(all);
        draw(all);
      } catch {
        place.hidden = true; // the page itself says why
      }
    }
    if (!signal.aborted) setTimeout(turn, EVERY_S * 1000);
  };
  turn();
}

const mayNotify = () => "Notification" in window && Notification.permission === "granted" && read(localStorage, NOTIFY) === "yes";

// Makes the button that turns notifications on and off; absent where the browser has none.
export function drawNotify(at, tell) {
  at.hidden = !("Notification" in window);
  at.textContent = mayNotify() ? "Notifications: on" : "Notifications: off";
  at.onclick = async () => {
    if (mayNotify()) write(localStorage, NOTIFY, "no");
    else if ((await Notification.requestPermission()) === "granted") write(localStorage, NOTIFY, "yes");
    else tell("The browser does not allow notifications of this page.", "error");
    drawNotify(at, tell);
  };
}
