// Sets the theme (light, dark or the system's) before the first paint, which avoids a flash.
(() => {
  const NAME = "tinsmith.theme";
  const storedTheme = () => {
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
    get: () => storedTheme() || "system",
    set: (theme) => {
      try {
        if (theme === "system") localStorage.removeItem(NAME);
        else localStorage.setItem(NAME, theme);
      } catch {
        // Without storage the theme lasts until the page is reloaded.
      }
      apply(theme === "system" ? "" : theme);
      dispatchEvent(new Event("themechange"));
    },
  };
  apply(storedTheme());
})();
