"""jupyter nbconvert --config=slides.py --to slides NAME.ipynb: slides of a lesson."""
c = get_config()  # noqa: F821 (nbconvert gives it)
c.SlidesExporter.template_file = "slides.html.j2"
c.SlidesExporter.reveal_width, c.SlidesExporter.reveal_height = "1230", "690"  # 1280 x 720 less reveal.js's margin
c.SlidesExporter.TagRemovePreprocessor.enabled = True
c.SlidesExporter.TagRemovePreprocessor.remove_input_tags = {"hide-input"}
