// The page without its pictures: light and dark, and tables that are sorted and searched.
"use strict";
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const set = (theme) => {
    root.dataset.theme = theme;
    dispatchEvent(new Event("themed"));
  };
  set(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => set(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () => set(root.dataset.theme === "dark" ? "light" : "dark"));
  let screen = null; // the theme while the page is printed, which is always on white
  addEventListener("beforeprint", () => {
    screen = root.dataset.theme;
    set("light");
  });
  addEventListener("afterprint", () => set(screen));

  const key = (row, place) => {
    const cell = row.cells[place];
    return "sort" in cell.dataset ? Number(cell.dataset.sort) : cell.textContent.trim();
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));

  for (const box of document.querySelectorAll(".table")) {
    const body = box.querySelector("tbody");
    const heads = [...box.querySelectorAll("th")];
    heads.forEach((head, place) =>
      head.querySelector("button").addEventListener("click", () => {
        const first = head.classList.contains("number") ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((one) => one.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        body.append(...[...body.rows].sort((a, b) => sign * compare(key(a, place), key(b, place))));
      }),
    );
    const input = box.querySelector("input");
    input?.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += !row.hidden;
      }
      box.querySelector("output").textContent = `${shown} of ${body.rows.length} rows`;
    });
  }
})();
