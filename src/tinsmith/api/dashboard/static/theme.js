// Light, dark or as the system has it; before the first paint, so that nothing flashes.
(() => {
  const NAME = "tinsmith.theme";
  const kept = () => {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null;
    }
  };
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
  };
  window.tinsmithTheme = {
    get: () => kept() || "system",
    set: (theme) => {
      try {
        if (theme === "system") localStorage.removeItem(NAME);
        else localStorage.setItem(NAME, theme);
      } catch {
        // A browser that keeps nothing shows it until the page is loaded again.
      }
      apply(theme === "system" ? "" : theme);
      dispatchEvent(new Event("themechange"));
    },
  };
  apply(kept());
})();
