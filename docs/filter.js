// A table with many rows gets a box, which hides the rows without the words that one types. Without it all are shown.
for (const table of document.querySelectorAll("article table")) {
  const rows = [...table.querySelectorAll("tbody tr")];
  if (rows.length < 30) continue;
  const box = Object.assign(document.createElement("input"), {
    type: "search", className: "filter", placeholder: "Show rows with …", ariaLabel: "Show rows with these words",
  });
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
  });
  table.before(box);
}
