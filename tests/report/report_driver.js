// What test_report_cli.py does to the page in a browser; the answers go into data-said of the body.
addEventListener("load", () => {
  const say = [];
  for (const button of document.querySelectorAll("#tabs [role=tab]")) {
    button.click();
    const shown = [...document.querySelectorAll("main > section")].filter((s) => !s.hidden);
    say.push(shown.length + ":" + shown[0].id + ":" + (shown[0].textContent.length > 40));
  }
  document.getElementById("tab-pipeline").click();
  const diagram = drawn[0], canvas = diagram.canvas, box = canvas.getBoundingClientRect();
  const colours = new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data);
  say.push("drawn:" + (colours.size > 8));
  const views = [diagram.view.join("-")], now = () => views.push(diagram.view.join("-"));
  const pointer = (type, x, more) => canvas.dispatchEvent(new PointerEvent(type,
    { clientX: box.left + x, clientY: box.top + 40, pointerId: 1, bubbles: true, ...more }));
  canvas.setPointerCapture = () => {};
  const [closer, , whole] = document.querySelectorAll("#pipeline .buttons button");
  const path = document.querySelectorAll("#pipeline input")[1];
  closer.click(); now();
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -200, ctrlKey: true, clientX: box.left + 400 })); now();
  whole.click();
  pointer("pointerdown", 300); pointer("pointermove", 500); pointer("pointerup", 500); now();
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" })); now();
  say.push("views:" + new Set(views).size);
  canvas.dispatchEvent(new MouseEvent("dblclick")); say.push("whole:" + (diagram.view.join("-") === views[0]));
  const details = document.getElementById("details"), seen = new Map();
  for (let x = 120; x < box.width; x += 4) { pointer("pointermove", x); if (!details.hidden) seen.set(details.textContent, x); }
  say.push("details:" + (seen.size > 0));
  const [words, x] = [...seen][0];
  pointer("pointerdown", x); pointer("pointerup", x);
  for (const other of seen.values()) pointer("pointermove", other);
  dispatchEvent(new Event("resize"));  // as phones do when one scrolls
  const over = details.getBoundingClientRect().top < box.top + 60;  // it would cover what it is about
  say.push("pinned:" + (!over && details.textContent.slice(0, 12) === words.slice(0, 12)));
  dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" })); say.push("released:" + details.hidden);
  const search = document.querySelector("#tabs input");
  search.value = "all-reduce"; search.dispatchEvent(new Event("input"));
  say.push("sought:" + (diagram.sought === null ? 0 : diagram.sought.filter(Boolean).length));
  search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  say.push("next:" + details.textContent.includes("all-reduce"));
  search.value = ""; search.dispatchEvent(new Event("input"));
  say.push("path:" + (path.click(), diagram.pathShown));
  say.push("strange:" + document.querySelectorAll("img, iframe, object, link").length);
  say.push("scripts:" + document.querySelectorAll("script:not([data-driver])").length);
  document.body.dataset.said = say.join(" ");
});
