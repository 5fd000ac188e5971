from flashtile.former import moved

moved(__name__)
