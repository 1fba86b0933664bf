// What happens when the page is opened: light or dark, then the gallery, if there is one.

function theme() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // until then the style sheet follows the system by itself
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
  if (data) new Gallery(data, read(data, await inflated(data.bytes)));
  document.documentElement.dataset.ready = "yes"; // for whoever waits for the drawing, such as a test
}

main();
