// Runs when the page opens: sets the theme, then creates the gallery, if there is one.

function theme() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // null: the style sheet follows the system
  const apply = () => {
    if (chosen !== null) document.documentElement.dataset.theme = chosen ? "dark" : "light";
    button.setAttribute("aria-pressed", chosen === null ? system.matches : chosen);
  };
  system.addEventListener("change", apply);
  button.addEventListener("click", () => {
    chosen = button.getAttribute("aria-pressed") !== "true";
    apply();
  });
  apply();
}

async function main() {
  theme();
  const data = JSON.parse(document.getElementById("data").textContent);
  if (data) new Gallery(data, read(data, await inflate(data.bytes)));
  document.documentElement.dataset.ready = "yes"; // tells tests that the drawing is finished
}

main();
