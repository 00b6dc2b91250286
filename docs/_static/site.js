// Tables of prose fold on a phone (site.css): each cell but the first gets the name of its column, if there are several.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll("article table.docutils")) {
    const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    const isNumbers = table.querySelectorAll("td.text-right").length > 0 || names.length > 5;
    if (isNumbers && !table.closest(".numbers")) continue;
    table.classList.add("folds");
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.cells].forEach((cell, i) => { if (i && names.length > 2 && names[i] && cell.textContent.trim()) cell.dataset.column = names[i]; });
  }
});
