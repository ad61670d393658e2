// What test_report_cli.py does to the page in a browser; the answers go into data-said of the body.
addEventListener("load", () => {
  const say = [];
  for (const button of document.querySelectorAll("#tabs button")) {
    button.click();
    const shown = [...document.querySelectorAll("main > section")].filter((s) => !s.hidden);
    say.push(shown.length + ":" + shown[0].id + ":" + (shown[0].textContent.length > 40));
  }
  document.getElementById("tab-pipeline").click();
  const canvas = document.getElementById("diagram"), box = canvas.getBoundingClientRect();
  const drawn = new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data);
  say.push("drawn:" + (drawn.size > 8));
  const views = [diagram.view.join("-")];
  const pointer = (type, x, more) => canvas.dispatchEvent(new PointerEvent(type,
    { clientX: box.left + x, clientY: box.top + 40, pointerId: 1, bubbles: true, ...more }));
  canvas.setPointerCapture = () => {};
  document.getElementById("zoom-in").click(); views.push(diagram.view.join("-"));
  canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -200, ctrlKey: true, clientX: box.left + 400 }));
  views.push(diagram.view.join("-"));
  document.getElementById("zoom-fit").click();
  pointer("pointerdown", 300); pointer("pointermove", 500); pointer("pointerup", 500);
  views.push(diagram.view.join("-"));
  canvas.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" })); views.push(diagram.view.join("-"));
  say.push("views:" + new Set(views).size);
  canvas.dispatchEvent(new MouseEvent("dblclick")); say.push("whole:" + (diagram.view.join("-") === views[0]));
  const tips = new Set();
  for (let x = 120; x < box.width; x += 4) { pointer("pointermove", x); if (!TIP.hidden) tips.add(TIP.textContent); }
  say.push("tips:" + [...tips].some((tip) => tip.includes("compute")));
  say.push("path:" + (document.getElementById("show-path").click(), diagram.pathShown));
  say.push("strange:" + document.querySelectorAll("img, iframe, object, link").length);
  say.push("scripts:" + document.querySelectorAll("script:not([data-driver])").length);
  document.body.dataset.said = say.join(" ");
});
